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
    // From now, at least 1 ns, and then every `repeat_ns`, 0 for once; replaces an earlier one.
    void arm(std::int64_t delay_ns, std::int64_t repeat_ns = 0);
    void disarm();
    void drain();  // after the descriptor became readable
    void close();  // idempotent

  private:
    int fd_ = -1;
};

}  // namespace aiokv
