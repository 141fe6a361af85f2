// IoQueue: reads and writes of files that end asynchronously and are announced by an eventfd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aiokv/error.hpp"

namespace aiokv {

enum class IoOperation : std::uint8_t { kRead, kWrite, kFlush };

// kFlush is fdatasync(): it ignores address, length and offset.
struct IoRequest {
    int fd = -1;
    IoOperation operation = IoOperation::kRead;
    std::uint32_t length = 0;  // bytes, at most kMaxIoBytes
    std::uint64_t address = 0;
    std::uint64_t offset = 0;
    std::uint64_t tag = 0;  // set by the caller and returned with the result
};

// `result`: number of moved bytes, 0 for a flush, or -errno. Fewer bytes than requested mean that
// the file has ended. A write that failed after a part of its bytes has the errno of the failure.
struct IoResult {
    std::uint64_t tag = 0;
    std::int32_t result = 0;
};

inline constexpr std::uint32_t kMaxIoBytes = 0x7ffff000;   // the kernel's limit for one request
inline constexpr std::uint32_t kDirectIoAlignment = 4096;  // required by O_DIRECT
inline constexpr std::size_t kMaxIoEntries = 4096;

enum class IoBackendChoice { kAuto, kIoUring, kThreads };

class IoBackend;
class IoCompletions;

// Requests end in any order. The kernel owns the memory of a request until its result can be read.
// Native threads call the kernel: no method waits for the medium, except close(). All methods but
// close() are thread-safe. A forked child can only destroy a queue of its parent.
class IoQueue {
  public:
    // At most `entries` requests are in the kernel at a time; the queue holds the others. Throws
    // ConfigError if `entries` is out of range, or if io_uring is required and refused.
    IoQueue(std::size_t entries, IoBackendChoice choice);
    ~IoQueue();  // close()
    IoQueue(const IoQueue&) = delete;
    IoQueue& operator=(const IoQueue&) = delete;

    const char* backend() const { return name_; }       // "io_uring" or "threads"
    const std::string& reason() const { return why_; }  // why io_uring is not used, or ""

    // File descriptor that is readable from the end of the last request of a submit() until pop()
    // has removed all results; -1 after close().
    int fd() const;

    // Number of requests whose results were not removed.
    std::size_t pending() const;

    // Maps this memory into the kernel once for all later requests inside it. The result, with
    // `tag`, is 0, or -errno if the kernel refused: requests then work, but are slower.
    void register_buffer(std::uint64_t address, std::size_t num_bytes, std::uint64_t tag);

    // Starts all requests. Throws LayoutError, starting none, if a request is too long, or is not
    // aligned while its file is open with O_DIRECT.
    void submit(std::span<const IoRequest> requests);

    // Asks the kernel to end the requests with these tags early. Each still has a result, which is
    // -ECANCELED if it was cancelled in time.
    void cancel(std::span<const std::uint64_t> tags);

    // Returns at most `limit` of the oldest results, without removing them.
    std::vector<IoResult> peek(std::size_t limit) const;

    // Removes the `count` oldest results. Throws UsageError when there are fewer.
    void pop(std::size_t count);

    // Cancels the requests that have not started and blocks until the kernel accesses no memory
    // of the others. Results can be read afterwards. Idempotent.
    void close();

  private:
    void check_usable(const char* method) const;
    void check_process(const char* method) const;

    std::unique_ptr<IoCompletions> completions_;
    std::unique_ptr<IoBackend> backend_;  // null when closed
    const char* name_ = "";
    std::string why_;
    std::uint64_t fork_generation_;
};

}  // namespace aiokv
