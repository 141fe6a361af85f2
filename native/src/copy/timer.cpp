#include "aiokv/timer.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace aiokv {

namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;

}  // namespace

TimerFd::TimerFd() : fd_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
}

void TimerFd::arm(std::int64_t delay_ns) {
    const std::int64_t delay = std::max<std::int64_t>(delay_ns, 1);
    itimerspec spec{};
    spec.it_value.tv_sec = delay / kSecondNs;
    spec.it_value.tv_nsec = delay % kSecondNs;
    if (timerfd_settime(fd_, 0, &spec, nullptr) != 0) {
        throw std::system_error(errno, std::generic_category(), "timerfd_settime");
    }
}

void TimerFd::drain() {
    std::uint64_t expirations = 0;
    while (read(fd_, &expirations, sizeof expirations) > 0) {
    }
}

void TimerFd::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

}  // namespace aiokv
