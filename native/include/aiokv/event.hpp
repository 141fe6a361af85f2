// Event: a point in a stream's order that any thread may query or wait for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {

// Returns nanoseconds of the monotonic clock that Python's time.monotonic() reads.
std::int64_t monotonic_ns();

// Each recording opens a new generation, so that a reused event never reports the end of its last
// use. Unlike CUDA's events, an event that was never recorded is not done. Thread-safe.
class Event : public std::enable_shared_from_this<Event> {
  public:
    Event() = default;
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
    bool recorded() const { return generation() != 0; }

    // Returns true if the latest generation has finished or failed.
    bool done() const {
        return recorded() && finished_.load(std::memory_order_acquire) == generation();
    }

    // Returns the error of the latest generation; empty while it is not done and after success.
    std::string error() const;

    // Returns the time at which the latest generation finished, on the monotonic clock; 0 before.
    std::int64_t finished_ns() const;

    // Blocks until the present generation is done. Throws UsageError if the event was never
    // recorded.
    void synchronize() const;

    // For streams: opens a generation and returns its number.
    std::uint64_t open();

    // For streams: ends a generation; ignores one that is not the latest. `error`: empty for
    // success.
    void finish(std::uint64_t generation, std::string error = {});

    // For streams: waits until `generation` has finished or `stop` is set (then see wake()).
    void wait(std::uint64_t generation, const std::atomic<bool>& stop) const;

    // Wakes wait(), which then checks its stop flag again.
    void wake() const;

  private:
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::atomic<std::uint64_t> generation_{0};
    std::atomic<std::uint64_t> finished_{0};  // highest finished generation
    std::int64_t finished_ns_ = 0;
    std::string error_;
};

}  // namespace aiokv
