// Transfer: one request whose bytes the kernel may move in several parts.
#pragma once

#include <cerrno>
#include <cstdint>

#include "aiokv/io_queue.hpp"

namespace aiokv {

inline constexpr int kMaxAttempts = 64;             // of one part, when the kernel answers EAGAIN
inline constexpr std::uint32_t kSectorBytes = 512;  // a read that ends elsewhere met the file's end

class Transfer {
  public:
    Transfer() = default;
    explicit Transfer(const IoRequest& request) : request_(request) {}

    const IoRequest& request() const { return request_; }
    std::uint64_t address() const { return request_.address + moved_; }
    std::uint64_t offset() const { return request_.offset + moved_; }
    std::uint32_t length() const { return request_.length - moved_; }
    IoResult result() const { return {request_.tag, result_}; }

    bool cancelled() const { return cancelled_; }
    void cancel() { cancelled_ = true; }

    // Takes what the kernel answered for the remaining part: bytes or -errno. Returns true when
    // the request has ended, false when what is left of it must be given to the kernel again.
    bool advance(std::int32_t answer) {
        if (answer < 0) return fail(-answer);
        if (request_.operation == IoOperation::kFlush) return end(0);
        attempts_ = 0;
        moved_ += static_cast<std::uint32_t>(answer);
        if (moved_ == request_.length) return end(static_cast<std::int32_t>(moved_));
        if (request_.operation == IoOperation::kWrite) {
            return answer == 0 ? end(-EIO) : stop_if_cancelled();
        }
        const bool at_end = answer == 0 || moved_ % kSectorBytes != 0;
        return at_end ? end(static_cast<std::int32_t>(moved_)) : stop_if_cancelled();
    }

  private:
    bool end(std::int32_t result) {
        result_ = result;
        return true;
    }

    bool stop_if_cancelled() { return cancelled_ && end(-ECANCELED); }

    bool fail(int error) {
        if (error == EINTR || error == EAGAIN) {
            if (cancelled_) return end(-ECANCELED);
            return ++attempts_ >= kMaxAttempts && end(-error);
        }
        // The rest of a short O_DIRECT read may begin at the end of the file, between two of its
        // logical blocks, where the kernel refuses to read.
        if (error == EINVAL && moved_ > 0 && request_.operation == IoOperation::kRead) {
            return end(static_cast<std::int32_t>(moved_));
        }
        return end(-error);
    }

    IoRequest request_;
    std::uint32_t moved_ = 0;
    int attempts_ = 0;
    std::int32_t result_ = 0;
    bool cancelled_ = false;
};

}  // namespace aiokv
