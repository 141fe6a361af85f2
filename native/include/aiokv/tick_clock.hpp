// A clock for statistics and listings. No decision may depend on it (I9).
#pragma once

#include <time.h>

#include <cstdint>

namespace aiokv {

// Returns the time of the kernel's last tick. It advances every few milliseconds; reading it costs
// a quarter of reading the exact time.
inline std::uint64_t tick_nanoseconds() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
           static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace aiokv
