// Makes a range of host memory reachable for the copy engines, in the background.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace aiokv::cuda {

struct RegistrationOptions {
    int device = 0;
    std::size_t chunk_bytes = std::size_t{64} << 20;
    unsigned touch_threads = 8;
    int numa_node = -1;        // -1: leave the placement alone
    bool numa_strict = false;  // only that node, else that node first
};

// Touches the pages from many threads, because page faults cost more than pinning, and registers
// the touched chunks in order. The registered part is a growing prefix that can be used at once.
// Touching changes no byte.
class HostRegistration {
  public:
    HostRegistration(std::uintptr_t base, std::size_t bytes, RegistrationOptions options);
    ~HostRegistration();  // calls close()
    HostRegistration(const HostRegistration&) = delete;
    HostRegistration& operator=(const HostRegistration&) = delete;

    std::size_t chunk_bytes() const { return options_.chunk_bytes; }
    std::size_t total_bytes() const { return bytes_; }
    std::size_t ready_bytes() const { return ready_.load(std::memory_order_acquire); }
    bool finished() const;
    // Seconds from the start to the end, or until now.
    double elapsed_seconds() const;
    // Blocks until the first `bytes` are registered. Throws DeviceError if the registration has
    // failed or was cancelled.
    void wait_ready(std::size_t bytes);
    // Stops after the current chunk. Registered chunks stay registered.
    void cancel();
    // Cancels, and removes all registrations. Nothing may use the memory any more. Idempotent.
    void close();

  private:
    void run();
    void touch();
    void register_chunks();
    void stop(const std::string& reason, int code);
    void bind();

    std::uint8_t* const base_;
    const std::size_t bytes_;
    const RegistrationOptions options_;
    const std::size_t num_chunks_;
    double started_seconds_;
    std::atomic<double> ended_seconds_{0.0};

    std::atomic<std::size_t> ready_{0};
    std::atomic<std::size_t> next_touch_{0};
    std::vector<std::atomic<std::uint32_t>> touched_;  // number of touched pieces per chunk
    std::atomic<bool> cancelled_{false};

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool finished_ = false;
    std::string failure_;
    int failure_code_ = 0;
    std::thread thread_;
};

}  // namespace aiokv::cuda
