// A clock for statistics and listings: no decision depends on it (I9).
#pragma once

#include <time.h>

#include <cstdint>

namespace aiokv {

// Time of the kernel's last tick: it advances every few milliseconds, and reading it costs a
// quarter of the exact time.
inline std::uint64_t tick_nanoseconds() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
           static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace aiokv
