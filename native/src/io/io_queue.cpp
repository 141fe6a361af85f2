#include "aiokv/io_queue.hpp"

#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>

#include "backend.hpp"
#include "ring.hpp"
#include "ring_backend.hpp"
#include "thread_backend.hpp"

namespace aiokv {
namespace {

std::atomic<std::uint64_t> forks{0};  // forks since the first queue, including those of ancestors

std::uint64_t fork_generation() {
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    static_cast<void>(registered);
    return forks.load(std::memory_order_relaxed);
}

std::unique_ptr<IoBackend> make_backend(std::size_t entries, IoBackendChoice choice,
                                        IoCompletions& completions, std::string& why) {
    if (choice == IoBackendChoice::kThreads) {
        why = "threads were chosen";
        return std::make_unique<ThreadBackend>(entries, completions);
    }
    try {
        return std::make_unique<RingBackend>(entries, completions);
    } catch (const RingRefused& refused) {
        why = refused.what();
    }
    if (choice == IoBackendChoice::kIoUring) {
        throw ConfigError("io_uring was chosen, but cannot be used: " + why)
            .hint("choose 'auto' or 'threads', or permit io_uring in the kernel and the sandbox");
    }
    return std::make_unique<ThreadBackend>(entries, completions);
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

// Queries each file once per run of requests. Ignores a wrong descriptor, which the kernel will
// report.
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
    : completions_(std::make_unique<IoCompletions>()), fork_generation_(fork_generation()) {
    if (entries < 1 || entries > kMaxIoEntries) {
        throw ConfigError("entries is " + std::to_string(entries) + "; it must be between 1 and " +
                          std::to_string(kMaxIoEntries));
    }
    backend_ = make_backend(entries, choice, *completions_, why_);
    name_ = backend_->name();
}

IoQueue::~IoQueue() {
    if (fork_generation() == fork_generation_) {
        close();
        return;
    }
    // The ring and the threads belong to the parent process, and its locks may have been held at
    // the fork.
    static_cast<void>(backend_.release());
    static_cast<void>(completions_.release());
}

int IoQueue::fd() const {
    return backend_ ? completions_->fd() : -1;
}

std::size_t IoQueue::pending() const {
    return completions_->pending();
}

void IoQueue::register_buffer(std::uint64_t address, std::size_t num_bytes, std::uint64_t tag) {
    check_usable("register_buffer");
    const IoJob job{.request = {.tag = tag}, .batch = completions_->open(1)};
    backend_->register_buffer(address, num_bytes, job);
}

void IoQueue::submit(std::span<const IoRequest> requests) {
    check_usable("submit");
    check_all(requests);
    if (requests.empty()) return;
    backend_->submit(requests, completions_->open(requests.size()));
}

void IoQueue::cancel(std::span<const std::uint64_t> tags) {
    check_usable("cancel");
    backend_->cancel(tags);
}

std::vector<IoResult> IoQueue::peek(std::size_t limit) const {
    check_process("peek");
    return completions_->peek(limit);
}

void IoQueue::pop(std::size_t count) {
    check_process("pop");
    completions_->pop(count);
}

void IoQueue::close() {
    if (!backend_) return;
    check_process("close");
    backend_->close();
    backend_.reset();
    completions_->close();
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
