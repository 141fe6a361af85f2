// ThreadBackend: an IoBackend for kernels and sandboxes without io_uring.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "job_line.hpp"

namespace aiokv {

// Each thread runs one job at a time, in blocking calls, and waits on a condition variable while
// there is none.
class ThreadBackend final : public IoBackend {
  public:
    static constexpr std::size_t kMaxThreads = 8;

    ThreadBackend(std::size_t entries, IoCompletions& completions);
    ~ThreadBackend() override { close(); }

    const char* name() const override { return "threads"; }
    void register_buffer(std::uint64_t address, std::size_t num_bytes, IoJob job) override;
    void submit(std::span<const IoRequest> requests, std::uint64_t batch) override;
    void cancel(std::span<const std::uint64_t> tags) override;
    void close() override;

  private:
    void run();

    IoCompletions& completions_;
    std::mutex mutex_;
    std::condition_variable wakeup_;
    JobLine line_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace aiokv
