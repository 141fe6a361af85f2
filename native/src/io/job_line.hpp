// JobLine: jobs that a backend has not started.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_set>

#include "completions.hpp"

namespace aiokv {

using TagSet = std::unordered_set<std::uint64_t>;

// Takes reads before writes and flushes, because requests for tokens wait for reads. But one of
// every kTurn jobs is a write or a flush, if there is one. Otherwise first in, first out. Not
// thread-safe.
class JobLine {
  public:
    static constexpr int kTurn = 8;

    explicit JobLine(IoCompletions& completions) : completions_(completions) {}

    bool empty() const { return reads_.empty() && others_.empty(); }
    bool has_reads() const { return !reads_.empty(); }

    void append(std::span<const IoRequest> requests, std::uint64_t batch) {
        for (const IoRequest& request : requests) {
            const bool reads = request.operation == IoOperation::kRead;
            (reads ? reads_ : others_).push_back({request, batch});
        }
    }

    // If `others` is false, takes a read, of which there must be one.
    IoJob take(bool others = true) {
        const bool turn_of_others = ++reads_in_turn_ >= kTurn && !others_.empty();
        if (!reads_.empty() && !(turn_of_others && others)) return take_from(reads_);
        reads_in_turn_ = 0;
        return take_from(others_);
    }

    void cancel(const TagSet& tags) {
        for (auto* jobs : {&reads_, &others_}) {
            std::erase_if(*jobs, [&](const IoJob& job) {
                const bool wanted = tags.contains(job.request.tag);
                if (wanted) completions_.end(job, -ECANCELED);
                return wanted;
            });
        }
    }

    void cancel_all() {
        for (auto* jobs : {&reads_, &others_}) {
            for (const IoJob& job : *jobs) completions_.end(job, -ECANCELED);
            jobs->clear();
        }
    }

  private:
    static IoJob take_from(std::deque<IoJob>& jobs) {
        const IoJob job = jobs.front();
        jobs.pop_front();
        return job;
    }

    IoCompletions& completions_;
    std::deque<IoJob> reads_;
    std::deque<IoJob> others_;
    int reads_in_turn_ = 0;
};

}  // namespace aiokv
