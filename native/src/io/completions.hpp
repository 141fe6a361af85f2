// IoCompletions: the results of an IoQueue, and the eventfd that announces them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "aiokv/io_queue.hpp"
#include "event_fd.hpp"

namespace aiokv {

// A request and the submit() that it belongs to.
struct IoJob {
    IoRequest request;
    std::uint64_t batch = 0;
};

// The eventfd is signalled when all jobs of a batch have ended, so that the reader wakes once per
// batch. It stays readable until all results are removed. Thread-safe.
class IoCompletions {
  public:
    int fd() const { return event_.fd(); }

    // Opens a batch and returns its number.
    std::uint64_t open(std::size_t num_jobs) {
        std::lock_guard lock(mutex_);
        num_pending_ += num_jobs;
        left_.emplace(++last_batch_, num_jobs);
        return last_batch_;
    }

    void end(const IoJob& job, std::int32_t result) {
        std::lock_guard lock(mutex_);
        results_.push_back({job.request.tag, result});
        const auto batch = left_.find(job.batch);
        if (--batch->second > 0) return;
        left_.erase(batch);
        event_.signal();
    }

    std::vector<IoResult> peek(std::size_t limit) const {
        std::lock_guard lock(mutex_);
        return {results_.begin(), at(std::min(limit, results_.size()))};
    }

    void pop(std::size_t count) {
        std::lock_guard lock(mutex_);
        if (count > results_.size()) {
            throw UsageError("pop: " + std::to_string(count) + " results are more than the " +
                             std::to_string(results_.size()) + " that there are");
        }
        results_.erase(results_.begin(), at(count));
        num_pending_ -= count;
        if (results_.empty()) event_.drain();
    }

    std::size_t pending() const {
        std::lock_guard lock(mutex_);
        return num_pending_;
    }

    // Closes the eventfd. Results can still be read.
    void close() {
        std::lock_guard lock(mutex_);
        event_.close();
    }

  private:
    std::deque<IoResult>::const_iterator at(std::size_t index) const {
        return results_.begin() + static_cast<std::ptrdiff_t>(index);
    }

    mutable std::mutex mutex_;
    EventFd event_;
    std::deque<IoResult> results_;
    std::unordered_map<std::uint64_t, std::size_t> left_;  // unfinished jobs, by batch
    std::uint64_t last_batch_ = 0;
    std::size_t num_pending_ = 0;
};

}  // namespace aiokv
