#include "aiokv/event.hpp"

#include <chrono>
#include <utility>

namespace aiokv {

std::int64_t monotonic_ns() {
    using std::chrono::steady_clock;
    return std::chrono::nanoseconds(steady_clock::now().time_since_epoch()).count();
}

std::string Event::error() const {
    std::lock_guard lock(mutex_);
    return done() ? error_ : std::string();
}

std::int64_t Event::finished_ns() const {
    std::lock_guard lock(mutex_);
    return done() ? finished_ns_ : 0;
}

void Event::synchronize() const {
    static const std::atomic<bool> never{false};
    const auto generation = this->generation();
    if (generation == 0) throw UsageError("the event was never recorded on a stream");
    wait(generation, never);
}

std::uint64_t Event::open() {
    std::lock_guard lock(mutex_);
    error_.clear();
    return generation_.fetch_add(1, std::memory_order_acq_rel) + 1;
}

void Event::finish(std::uint64_t generation, std::string error) {
    {
        std::lock_guard lock(mutex_);
        if (generation <= finished_.load(std::memory_order_relaxed)) return;
        if (generation == generation_.load(std::memory_order_relaxed)) {
            error_ = std::move(error);
            finished_ns_ = monotonic_ns();
        }
        finished_.store(generation, std::memory_order_release);
    }
    changed_.notify_all();
}

void Event::wait(std::uint64_t generation, const std::atomic<bool>& stop) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
        return finished_.load(std::memory_order_acquire) >= generation ||
               stop.load(std::memory_order_acquire);
    });
}

void Event::wake() const {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
}

}  // namespace aiokv
