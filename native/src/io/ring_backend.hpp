// RingBackend: an IoBackend on io_uring, with one thread that submits and collects.
#pragma once

#include <mutex>
#include <thread>
#include <unordered_map>

#include "backend.hpp"
#include "ring_commands.hpp"

namespace aiokv {

// The thread sleeps in the kernel until a request ends or a command arrives. It submits requests
// (which maps memory and notifies the device), continues short transfers and starts the next jobs,
// so that the caller's thread does none of this.
class RingBackend final : public IoBackend {
  public:
    RingBackend(std::size_t entries, IoCompletions& completions);  // throws RingRefused
    ~RingBackend() override { close(); }

    const char* name() const override { return "io_uring"; }
    void register_buffer(std::uint64_t address, std::size_t num_bytes, IoJob job) override;
    void submit(std::span<const IoRequest> requests, std::uint64_t batch) override;
    void cancel(std::span<const std::uint64_t> tags) override;
    void close() override;

  private:
    // Memory is registered in pieces of this size. The registration of one, whose pages exist,
    // holds the thread for about a millisecond.
    static constexpr std::size_t kPieceBytes = std::size_t{64} << 20;

    IoCompletions& completions_;
    RingCommands commands_;
    std::thread thread_;
    std::mutex mutex_;
    // Threads that allocate the pages of a registration, by the tag of its job.
    std::unordered_map<std::uint64_t, std::jthread> populations_;
};

}  // namespace aiokv
