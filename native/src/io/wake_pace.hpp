// WakePace: how many completions a thread waits for, so that small requests do not cost a wake-up
// each.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace aiokv {

// Number of completions to wait for at a time: those expected within kPatienceNs, by the moving
// average of the time between completions of a busy device. At most 1 / kMaxShare of the requests
// in flight, so that the device stays busy.
class WakePace {
  public:
    static constexpr std::int64_t kPatienceNs = 500'000;
    static constexpr std::size_t kMaxShare = 8;

    unsigned wanted(std::size_t in_flight) const {
        const std::size_t expected = static_cast<std::size_t>(kPatienceNs / interval_ns_);
        return static_cast<unsigned>(
            std::max<std::size_t>(1, std::min(expected, in_flight / kMaxShare)));
    }

    // Counts completions since the last call. `busy`: more will follow, so the time until the next
    // call is used to measure their rate.
    void count(std::size_t completions, bool busy) {
        const std::int64_t now = now_ns();
        if (was_busy_) {
            const auto shared = static_cast<std::int64_t>(std::max<std::size_t>(1, completions));
            const std::int64_t interval = (now - counted_at_ns_) / shared;
            interval_ns_ = std::max<std::int64_t>(1, interval_ns_ + (interval - interval_ns_) / 8);
        }
        was_busy_ = busy;
        counted_at_ns_ = now;
    }

  private:
    static std::int64_t now_ns() {
        return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::int64_t interval_ns_ = kPatienceNs;
    std::int64_t counted_at_ns_ = 0;
    bool was_busy_ = false;
};

}  // namespace aiokv
