// EventFd: an eventfd that is readable after signal() until drain().
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {

class EventFd {
  public:
    EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (fd_ < 0) throw InternalError(std::string("eventfd: ") + std::strerror(errno));
    }
    ~EventFd() { close(); }
    EventFd(const EventFd&) = delete;
    EventFd& operator=(const EventFd&) = delete;

    int fd() const { return fd_; }

    void signal() const {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written =
            ::write(fd_, &one, sizeof one);  // EAGAIN: already readable
    }

    void drain() const {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto read = ::read(fd_, &count, sizeof count);  // EAGAIN: was not
    }

    void close() {
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

  private:
    int fd_;
};

}  // namespace aiokv
