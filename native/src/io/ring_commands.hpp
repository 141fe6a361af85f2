// RingCommands: commands of other threads to the thread of a RingBackend.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "event_fd.hpp"
#include "job_line.hpp"

namespace aiokv {

struct Registration {
    std::uint64_t address;
    std::size_t num_bytes;
    IoJob job;
    bool is_last = true;  // of the pieces of the job, which ends when this one is registered
};

// Thread-safe. Each command makes the eventfd readable until drain().
class RingCommands {
  public:
    struct Taken {
        TagSet cancelled_tags;
        std::optional<Registration> registration;
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
        end_registrations([&](const IoJob& job) { return tags.contains(job.request.tag); });
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
        end_registrations([](const IoJob&) { return true; });
        event_.signal();
    }

    // Takes all commands except the jobs, but only the oldest registration: it takes milliseconds,
    // and jobs are started between two of them.
    Taken take() {
        std::lock_guard lock(mutex_);
        Taken taken{std::exchange(cancelled_tags_, {}), std::nullopt, closing_};
        if (!registrations_.empty()) {
            taken.registration = registrations_.front();
            registrations_.pop_front();
            if (!registrations_.empty()) event_.signal();
        }
        return taken;
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
    template <class Of>
    void end_registrations(const Of& of) {
        std::erase_if(registrations_, [&](const Registration& registration) {
            if (!of(registration.job)) return false;
            if (registration.is_last) completions_.end(registration.job, -ECANCELED);
            return true;
        });
    }

    IoCompletions& completions_;
    EventFd event_;
    std::mutex mutex_;
    JobLine line_;
    TagSet cancelled_tags_;
    std::deque<Registration> registrations_;
    bool closing_ = false;
};

}  // namespace aiokv
