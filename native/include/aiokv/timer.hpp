// TimerFd: a monotonic timer that an event loop watches as a file descriptor.
#pragma once

#include <cstdint>

namespace aiokv {

// A loop's own timers are rounded up to a millisecond or, when shorter, keep the loop busy. This
// one is exact.
class TimerFd {
  public:
    TimerFd();  // throws std::system_error
    ~TimerFd() { close(); }
    TimerFd(const TimerFd&) = delete;
    TimerFd& operator=(const TimerFd&) = delete;

    int fd() const { return fd_; }
    // Expires once, after at least 1 ns. Replaces an earlier arming.
    void arm(std::int64_t delay_ns);
    void drain();  // after the descriptor became readable
    void close();  // idempotent

  private:
    int fd_ = -1;
};

}  // namespace aiokv
