// ThreadBackend: an IoBackend for kernels and sandboxes without io_uring.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "aiokv/io_queue.hpp"
#include "backend.hpp"
#include "event_fd.hpp"
#include "transfer.hpp"

namespace aiokv {

// Each thread runs one request at a time, in blocking calls, and waits on a condition variable
// while there is none.
class ThreadBackend final : public IoBackend {
  public:
    static constexpr std::size_t kMaxThreads = 8;

    explicit ThreadBackend(std::size_t entries);
    ~ThreadBackend() override { close(); }

    const char* name() const override { return "threads"; }
    int fd() const override { return event_.fd(); }
    int register_buffer(std::uint64_t, std::size_t) override { return 0; }  // nothing to gain
    void submit(std::span<const IoRequest> requests) override;
    void cancel(std::span<const std::uint64_t> tags) override;
    void reap(std::vector<IoResult>& results, std::size_t limit) override;
    void close() override;

  private:
    void run();

    EventFd event_;
    std::mutex mutex_;
    std::condition_variable wakeup_;
    std::deque<IoRequest> waiting_;
    std::deque<IoResult> finished_;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace aiokv
