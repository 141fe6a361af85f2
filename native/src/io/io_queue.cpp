#include "aiokv/io_queue.hpp"

#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>

#include "backend.hpp"
#include "ring_backend.hpp"
#include "thread_backend.hpp"

namespace aiokv {
namespace {

std::atomic<std::uint64_t> forks{0};  // of this process and its ancestors, since the first queue

std::uint64_t fork_generation() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    static_cast<void>(registered);
    return forks.load(std::memory_order_relaxed);
}

std::unique_ptr<IoBackend> make_backend(std::size_t entries, IoBackendChoice choice,
                                        std::string& why) {
    if (choice == IoBackendChoice::kThreads) {
        why = "threads were chosen";
        return std::make_unique<ThreadBackend>(entries);
    }
    try {
        return std::make_unique<RingBackend>(entries);
    } catch (const RingRefused& refused) {
        why = refused.what();
    }
    if (choice == IoBackendChoice::kIoUring) {
        throw ConfigError("io_uring was chosen, but cannot be used: " + why)
            .hint("choose 'auto' or 'threads', or permit io_uring in the kernel and the sandbox");
    }
    return std::make_unique<ThreadBackend>(entries);
}

std::string text_of(const IoRequest& request) {
    const char* name = request.operation == IoOperation::kWrite ? "write" : "read";
    return std::string(name) + " of " + std::to_string(request.length) + " bytes at offset " +
           std::to_string(request.offset) + ", memory address " + std::to_string(request.address);
}

bool is_aligned(const IoRequest& request) {
    return (request.address | request.offset | request.length) % kDirectIoAlignment == 0;
}

void check(const IoRequest& request, bool direct) {
    if (request.length > kMaxIoBytes) {
        throw LayoutError(text_of(request) + ": one request moves at most " +
                          std::to_string(kMaxIoBytes) + " bytes");
    }
    constexpr std::uint64_t kMaxOffset = std::numeric_limits<std::int64_t>::max();
    if (request.offset > kMaxOffset - request.length) {
        throw LayoutError(text_of(request) + ": a file ends at " + std::to_string(kMaxOffset));
    }
    if (direct && !is_aligned(request)) {
        throw LayoutError(text_of(request) +
                          ": the file is open with O_DIRECT, so all three must "
                          "be multiples of " +
                          std::to_string(kDirectIoAlignment));
    }
}

// One query per run of requests with the same file. A wrong descriptor is the kernel's to report.
void check_all(std::span<const IoRequest> requests) {
    int fd = -1;
    bool direct = false;
    for (const auto& request : requests) {
        if (request.operation == IoOperation::kFlush) continue;
        if (request.fd != fd) {
            fd = request.fd;
            const int flags = ::fcntl(fd, F_GETFL);
            direct = flags >= 0 && (flags & O_DIRECT) != 0;
        }
        check(request, direct);
    }
}

}  // namespace

IoQueue::IoQueue(std::size_t entries, IoBackendChoice choice)
    : fork_generation_(fork_generation()) {
    if (entries < 1 || entries > kMaxIoEntries) {
        throw ConfigError("entries is " + std::to_string(entries) + "; it must be between 1 and " +
                          std::to_string(kMaxIoEntries));
    }
    backend_ = make_backend(entries, choice, why_);
    name_ = backend_->name();
}

IoQueue::~IoQueue() {
    if (fork_generation() != fork_generation_) {
        // The ring and the threads belong to the parent process.
        static_cast<void>(backend_.release());
        return;
    }
    close();
}

int IoQueue::fd() const {
    return backend_ ? backend_->fd() : -1;
}

int IoQueue::register_buffer(std::uint64_t address, std::size_t num_bytes) {
    check_usable("register_buffer");
    if (num_pending_ > 0) {
        throw UsageError("register_buffer: " + std::to_string(num_pending_) +
                         " requests are pending")
            .hint("register the memory before the first request");
    }
    return num_bytes == 0 ? 0 : backend_->register_buffer(address, num_bytes);
}

void IoQueue::submit(std::span<const IoRequest> requests) {
    check_usable("submit");
    check_all(requests);
    if (requests.empty()) return;
    backend_->submit(requests);
    num_pending_ += requests.size();
}

void IoQueue::cancel(std::span<const std::uint64_t> tags) {
    check_usable("cancel");
    backend_->cancel(tags);
}

void IoQueue::reap(std::vector<IoResult>& results, std::size_t limit) {
    check_process("reap");
    const std::size_t before = results.size();
    if (backend_) {
        backend_->reap(results, limit);
    } else {
        const auto count = static_cast<std::ptrdiff_t>(std::min(limit, last_results_.size()));
        results.insert(results.end(), last_results_.begin(), last_results_.begin() + count);
        last_results_.erase(last_results_.begin(), last_results_.begin() + count);
    }
    num_pending_ -= results.size() - before;
}

void IoQueue::close() {
    if (!backend_) return;
    check_process("close");
    backend_->close();
    backend_->reap(last_results_, num_pending_);
    backend_.reset();
}

void IoQueue::check_usable(const char* method) const {
    check_process(method);
    if (!backend_) throw UsageError(std::string(method) + ": the IoQueue is closed");
}

void IoQueue::check_process(const char* method) const {
    if (fork_generation() == fork_generation_) return;
    throw UsageError(std::string(method) + ": the IoQueue was created before os.fork()")
        .hint("create another one in the child process");
}

}  // namespace aiokv
