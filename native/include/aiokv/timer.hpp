// TimerFd: a monotonic timer that an event loop watches as a file descriptor.
#pragma once

#include <cstdint>

namespace aiokv {

// Unlike a loop's own timers it is neither rounded up to a millisecond nor turned into a busy loop.
class TimerFd {
  public:
    TimerFd();  // throws std::system_error
    ~TimerFd() { close(); }
    TimerFd(const TimerFd&) = delete;
    TimerFd& operator=(const TimerFd&) = delete;

    int fd() const { return fd_; }
    // Expire once, in at least 1 ns from now; replaces an earlier arming.
    void arm(std::int64_t delay_ns);
    void drain();  // after the descriptor became readable
    void close();  // idempotent

  private:
    int fd_ = -1;
};

}  // namespace aiokv
