// RingLoop: the body of the thread of a RingBackend, which alone uses the ring.
#pragma once

#include <cstddef>
#include <vector>

#include "registered_buffers.hpp"
#include "ring.hpp"
#include "ring_commands.hpp"
#include "transfer.hpp"
#include "wake_pace.hpp"

namespace aiokv {

class RingLoop {
  public:
    // At most `entries` transfers are in the kernel at a time. Throws RingRefused.
    RingLoop(std::size_t entries, RingCommands& commands, IoCompletions& completions);

    // Starts and ends jobs until the commands are closed and nothing is in the kernel.
    void run();

  private:
    using Slot = std::uint32_t;

    void cancel(const RingCommands::Taken& taken);
    void register_buffer(const Registration& registration);
    void start_jobs();
    bool may_write() const;
    void count(const IoJob& job);
    void start(Slot slot);
    void watch_commands();
    void wait();
    void handle(const uring::Cqe& completion);
    void end(Slot slot);

    RingCommands& commands_;
    IoCompletions& completions_;
    Ring ring_;
    RegisteredBuffers buffers_;
    int refusal_ = 0;                  // errno of the registration that the kernel refused
    std::vector<Transfer> transfers_;  // by slot
    std::vector<Slot> free_;
    std::vector<Slot> continued_;  // slots of transfers with remaining parts
    bool watches_commands_ = false;
    WakePace pace_;
    std::size_t in_kernel_ = 0;      // commands of all kinds that have not completed
    std::size_t written_bytes_ = 0;  // bytes of the writes that have not completed
    std::size_t writes_since_read_ = 0;
};

}  // namespace aiokv
