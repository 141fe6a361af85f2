#include "thread_backend.hpp"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <unordered_set>

namespace aiokv {
namespace {

// Returns bytes or -errno, as io_uring does.
std::int32_t move_bytes(const Transfer& transfer) {
    const int fd = transfer.request().fd;
    const iovec part{reinterpret_cast<void*>(transfer.address()), transfer.length()};
    const auto offset = static_cast<off_t>(transfer.offset());
    ssize_t moved = 0;
    switch (transfer.request().operation) {
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

ThreadBackend::ThreadBackend(std::size_t entries) {
    for (std::size_t i = 0; i < std::min(entries, kMaxThreads); ++i) {
        threads_.emplace_back([this] { run(); });
        pthread_setname_np(threads_.back().native_handle(), "aiokv-io");
    }
}

void ThreadBackend::submit(std::span<const IoRequest> requests) {
    {
        std::lock_guard lock(mutex_);
        waiting_.insert(waiting_.end(), requests.begin(), requests.end());
    }
    if (requests.size() == 1) {
        wakeup_.notify_one();
    } else {
        wakeup_.notify_all();
    }
}

void ThreadBackend::cancel(std::span<const std::uint64_t> tags) {
    const std::unordered_set<std::uint64_t> wanted(tags.begin(), tags.end());
    const auto is_wanted = [&](const IoRequest& request) { return wanted.contains(request.tag); };
    std::lock_guard lock(mutex_);
    for (const auto& request : waiting_) {
        if (is_wanted(request)) finished_.push_back({request.tag, -ECANCELED});
    }
    std::erase_if(waiting_, is_wanted);
    if (!finished_.empty()) event_.signal();
}

void ThreadBackend::reap(std::vector<IoResult>& results, std::size_t limit) {
    event_.drain();
    std::lock_guard lock(mutex_);
    const std::size_t count = std::min(limit, finished_.size());
    const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
    results.insert(results.end(), finished_.begin(), end);
    finished_.erase(finished_.begin(), end);
    if (!finished_.empty()) event_.signal();
}

void ThreadBackend::close() {
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
        for (const auto& request : waiting_) finished_.push_back({request.tag, -ECANCELED});
        waiting_.clear();
    }
    wakeup_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void ThreadBackend::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        wakeup_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        Transfer transfer(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        while (!transfer.advance(move_bytes(transfer))) {
        }
        lock.lock();
        finished_.push_back(transfer.result());
        if (finished_.size() == 1) event_.signal();
    }
}

}  // namespace aiokv
