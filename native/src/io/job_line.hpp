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

// First in, first out. Not thread-safe.
class JobLine {
  public:
    explicit JobLine(IoCompletions& completions) : completions_(completions) {}

    bool empty() const { return jobs_.empty(); }

    void append(std::span<const IoJob> jobs) {
        jobs_.insert(jobs_.end(), jobs.begin(), jobs.end());
    }

    IoJob take() {
        const IoJob job = jobs_.front();
        jobs_.pop_front();
        return job;
    }

    void cancel(const TagSet& tags) {
        std::erase_if(jobs_, [&](const IoJob& job) {
            const bool wanted = tags.contains(job.request.tag);
            if (wanted) completions_.end(job, -ECANCELED);
            return wanted;
        });
    }

    void cancel_all() {
        for (const IoJob& job : jobs_) completions_.end(job, -ECANCELED);
        jobs_.clear();
    }

  private:
    IoCompletions& completions_;
    std::deque<IoJob> jobs_;
};

}  // namespace aiokv
