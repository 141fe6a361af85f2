// Stream: one thread that does its work first in, first out; the cpu device's copy engine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "aiokv/event.hpp"

namespace aiokv {

// The thread sleeps on a condition variable while there is nothing to do. All methods are
// thread-safe; none of them runs work on the caller's thread.
class Stream {
  public:
    // Work must finish its events in any case; `stop` asks it to do so early, with an error.
    using Work = std::function<void(const std::atomic<bool>& stop)>;

    explicit Stream(std::string name);
    ~Stream();  // abort()
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    const std::string& name() const { return name_; }

    // Appends work. Throws UsageError when the stream is closed.
    void push(Work work);

    // Opens a generation of `event`, which is done when all work pushed so far is.
    void record(std::shared_ptr<Event> event);

    // Lets work that is pushed later start after the event's present generation. Throws UsageError
    // if the event was never recorded, because it then has no place in the order.
    void wait_event(std::shared_ptr<Event> event);

    // Blocks until all work pushed so far is done.
    void synchronize();

    // Number of works and records that have not finished.
    std::size_t depth() const;

    // Refuses new work, finishes the queued work and joins the thread. Idempotent.
    void close();

    // Like close(), but ends the running and the queued work early, with errors.
    void abort();

  private:
    void run();
    void join();
    void wait_here(const Event& event, std::uint64_t generation);

    const std::string name_;
    mutable std::mutex mutex_;
    std::condition_variable wakeup_;
    std::deque<Work> queue_;
    bool busy_ = false;
    bool closed_ = false;
    const Event* waiting_on_ = nullptr;
    std::atomic<bool> stop_{false};
    std::mutex join_mutex_;
    std::thread thread_;
};

}  // namespace aiokv
