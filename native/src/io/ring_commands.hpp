// RingCommands: commands of other threads to the thread of a RingBackend.
#pragma once

#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "event_fd.hpp"
#include "job_line.hpp"

namespace aiokv {

struct Registration {
    std::uint64_t address;
    std::size_t num_bytes;
    IoJob job;  // ends when the memory is registered
};

// Thread-safe. Each command makes the eventfd readable until drain().
class RingCommands {
  public:
    struct Taken {
        TagSet cancelled_tags;
        std::vector<Registration> registrations;
        bool closing = false;
    };

    explicit RingCommands(IoCompletions& completions)
        : completions_(completions), line_(completions) {}

    int fd() const { return event_.fd(); }
    void drain() const { event_.drain(); }

    void submit(std::span<const IoRequest> requests, std::uint64_t batch) {
        std::lock_guard lock(mutex_);
        line_.append(requests, batch);
        event_.signal();
    }

    void cancel(const TagSet& tags) {
        std::lock_guard lock(mutex_);
        line_.cancel(tags);
        cancelled_tags_.insert(tags.begin(), tags.end());
        event_.signal();
    }

    void register_buffer(const Registration& registration) {
        std::lock_guard lock(mutex_);
        registrations_.push_back(registration);
        event_.signal();
    }

    void close() {
        std::lock_guard lock(mutex_);
        closing_ = true;
        line_.cancel_all();
        for (const auto& registration : registrations_) {
            completions_.end(registration.job, -ECANCELED);
        }
        registrations_.clear();
        event_.signal();
    }

    // Takes all commands except the jobs.
    Taken take() {
        std::lock_guard lock(mutex_);
        return {std::exchange(cancelled_tags_, {}), std::exchange(registrations_, {}), closing_};
    }

    // Calls `start` with the oldest jobs while `has_room` returns true. While `may_write` returns
    // false, only with reads.
    template <class HasRoom, class MayWrite, class Start>
    void take_jobs(const HasRoom& has_room, const MayWrite& may_write, const Start& start) {
        std::lock_guard lock(mutex_);
        while (!line_.empty() && has_room()) {
            const bool others = may_write();
            if (!others && !line_.has_reads()) return;
            start(line_.take(others));
        }
    }

  private:
    IoCompletions& completions_;
    EventFd event_;
    std::mutex mutex_;
    JobLine line_;
    TagSet cancelled_tags_;
    std::vector<Registration> registrations_;
    bool closing_ = false;
};

}  // namespace aiokv
