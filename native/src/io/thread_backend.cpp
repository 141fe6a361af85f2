#include "thread_backend.hpp"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "transfer.hpp"

namespace aiokv {
namespace {

// Returns bytes or -errno, as io_uring does.
std::int32_t move_bytes(const Transfer& transfer) {
    const int fd = transfer.job().request.fd;
    const iovec part{reinterpret_cast<void*>(transfer.address()), transfer.length()};
    const auto offset = static_cast<off_t>(transfer.offset());
    ssize_t moved = 0;
    switch (transfer.job().request.operation) {
        case IoOperation::kRead:
            moved = ::preadv(fd, &part, 1, offset);
            break;
        case IoOperation::kWrite:
            moved = ::pwritev(fd, &part, 1, offset);
            break;
        case IoOperation::kFlush:
            moved = ::fdatasync(fd);
            break;
    }
    return static_cast<std::int32_t>(moved < 0 ? -errno : moved);
}

}  // namespace

ThreadBackend::ThreadBackend(std::size_t entries, IoCompletions& completions)
    : completions_(completions), line_(completions) {
    for (std::size_t i = 0; i < std::min(entries, kMaxThreads); ++i) {
        threads_.emplace_back([this] { run(); });
        pthread_setname_np(threads_.back().native_handle(), "aiokv-io");
    }
}

// The kernel maps memory per call.
void ThreadBackend::register_buffer(std::uint64_t, std::size_t, IoJob job) {
    completions_.end(job, 0);
}

void ThreadBackend::submit(std::span<const IoRequest> requests, std::uint64_t batch) {
    {
        std::lock_guard lock(mutex_);
        line_.append(requests, batch);
    }
    if (requests.size() == 1) {
        wakeup_.notify_one();
    } else {
        wakeup_.notify_all();
    }
}

void ThreadBackend::cancel(std::span<const std::uint64_t> tags) {
    const TagSet wanted(tags.begin(), tags.end());
    std::lock_guard lock(mutex_);
    line_.cancel(wanted);
}

void ThreadBackend::close() {
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
        line_.cancel_all();
    }
    wakeup_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void ThreadBackend::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        wakeup_.wait(lock, [this] { return closed_ || !line_.empty(); });
        if (line_.empty()) return;
        Transfer transfer(line_.take());
        lock.unlock();
        while (!transfer.advance(move_bytes(transfer))) {
        }
        completions_.end(transfer.job(), transfer.result());
        lock.lock();
    }
}

}  // namespace aiokv
