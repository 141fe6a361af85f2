// RingBackend: an IoBackend on io_uring. The kernel reads and writes without a thread of aiokv.
#pragma once

#include <deque>
#include <vector>

#include "aiokv/io_queue.hpp"
#include "backend.hpp"
#include "event_fd.hpp"
#include "registered_buffers.hpp"
#include "ring.hpp"
#include "transfer.hpp"

namespace aiokv {

class RingBackend final : public IoBackend {
  public:
    explicit RingBackend(std::size_t entries);  // throws RingRefused
    ~RingBackend() override = default;

    const char* name() const override { return "io_uring"; }
    int fd() const override { return event_.fd(); }
    int register_buffer(std::uint64_t address, std::size_t num_bytes) override;
    void submit(std::span<const IoRequest> requests) override;
    void cancel(std::span<const std::uint64_t> tags) override;
    void reap(std::vector<IoResult>& results, std::size_t limit) override;
    void close() override;

  private:
    using Slot = std::uint32_t;

    void start_waiting();
    bool start(Slot slot);
    void finish_next();
    void submit_prepared();

    EventFd event_;
    Ring ring_;
    RegisteredBuffers buffers_;
    std::vector<Transfer> transfers_;  // by slot; in the kernel, or in `continued_`
    std::vector<Slot> free_;
    std::vector<Slot> continued_;  // slots whose remaining part must go to the kernel
    std::deque<IoRequest> waiting_;
    std::deque<IoResult> finished_;
    std::size_t in_kernel_ = 0;  // completions to come, those of cancellations included
};

}  // namespace aiokv
