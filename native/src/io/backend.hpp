// IoBackend: how an IoQueue moves bytes. RingBackend uses io_uring, ThreadBackend a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/io_queue.hpp"

namespace aiokv {

// The methods are those of IoQueue, which has checked the arguments and the state.
class IoBackend {
  public:
    IoBackend() = default;
    virtual ~IoBackend() = default;
    IoBackend(const IoBackend&) = delete;
    IoBackend& operator=(const IoBackend&) = delete;

    virtual const char* name() const = 0;
    virtual int fd() const = 0;
    virtual int register_buffer(std::uint64_t address, std::size_t num_bytes) = 0;
    virtual void submit(std::span<const IoRequest> requests) = 0;
    virtual void cancel(std::span<const std::uint64_t> tags) = 0;
    virtual void reap(std::vector<IoResult>& results, std::size_t limit) = 0;
    virtual void close() = 0;
};

}  // namespace aiokv
