// IoBackend: how an IoQueue moves bytes. RingBackend uses io_uring, ThreadBackend a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "completions.hpp"

namespace aiokv {

// A backend ends each job by IoCompletions::end(). All methods but close() are thread-safe.
class IoBackend {
  public:
    IoBackend() = default;
    virtual ~IoBackend() = default;
    IoBackend(const IoBackend&) = delete;
    IoBackend& operator=(const IoBackend&) = delete;

    virtual const char* name() const = 0;

    // Registers memory, and ends `job` when the kernel has mapped it or has refused. The request of
    // `job` is ignored.
    virtual void register_buffer(std::uint64_t address, std::size_t num_bytes, IoJob job) = 0;

    virtual void submit(std::span<const IoRequest> requests, std::uint64_t batch) = 0;
    virtual void cancel(std::span<const std::uint64_t> tags) = 0;

    // Cancels the jobs that have not started, waits for the others, and joins the threads.
    virtual void close() = 0;
};

}  // namespace aiokv
