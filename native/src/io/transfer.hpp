// Transfer: one request whose bytes the kernel may move in several parts.
#pragma once

#include <cerrno>
#include <cstdint>

#include "completions.hpp"

namespace aiokv {

inline constexpr int kMaxAttempts = 64;  // attempts per part while the kernel answers EAGAIN
inline constexpr std::uint32_t kSectorBytes = 512;  // a read that ends elsewhere met the file's end

class Transfer {
  public:
    Transfer() = default;
    explicit Transfer(const IoJob& job) : job_(job), ended_(false) {}

    const IoJob& job() const { return job_; }
    // The part that has not moved yet.
    std::uint64_t address() const { return job_.request.address + moved_; }
    std::uint64_t offset() const { return job_.request.offset + moved_; }
    std::uint32_t length() const { return job_.request.length - moved_; }

    bool ended() const { return ended_; }            // true also without a job
    std::int32_t result() const { return result_; }  // when it has ended

    bool cancelled() const { return cancelled_; }
    void cancel() { cancelled_ = true; }

    // Takes the kernel's answer for the remaining part: bytes or -errno. Returns true if the
    // request has ended, and false if a part of it must be given to the kernel again.
    bool advance(std::int32_t answer) {
        if (answer < 0) return fail(-answer);
        if (job_.request.operation == IoOperation::kFlush) return end(0);
        attempts_ = 0;
        moved_ += static_cast<std::uint32_t>(answer);
        if (moved_ == job_.request.length) return end(static_cast<std::int32_t>(moved_));
        if (job_.request.operation == IoOperation::kWrite) {
            return answer == 0 ? end(-EIO) : stop_if_cancelled();
        }
        const bool at_end = answer == 0 || moved_ % kSectorBytes != 0;
        return at_end ? end(static_cast<std::int32_t>(moved_)) : stop_if_cancelled();
    }

    // Ends an unfinished request if it was cancelled. Returns true if it was.
    bool stop_if_cancelled() { return cancelled_ && end(-ECANCELED); }

  private:
    bool end(std::int32_t result) {
        result_ = result;
        ended_ = true;
        return true;
    }

    bool fail(int error) {
        if (error == EINTR || error == EAGAIN) {
            return stop_if_cancelled() || (++attempts_ >= kMaxAttempts && end(-error));
        }
        // The rest of a short O_DIRECT read may begin at the end of the file, between two of its
        // logical blocks, where the kernel refuses to read.
        if (error == EINVAL && moved_ > 0 && job_.request.operation == IoOperation::kRead) {
            return end(static_cast<std::int32_t>(moved_));
        }
        return end(-error);
    }

    IoJob job_;
    std::uint32_t moved_ = 0;
    int attempts_ = 0;
    std::int32_t result_ = 0;
    bool ended_ = true;
    bool cancelled_ = false;
};

}  // namespace aiokv
