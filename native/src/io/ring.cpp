#include "ring.hpp"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace aiokv {
namespace {

// From the flags with the cheapest way to run completions, in the call that waits for them, to the
// flags that all kernels have.
constexpr std::array<std::uint32_t, 3> kSetupFlags = {
    uring::kSetupSingleIssuer | uring::kSetupDeferTaskrun,
    uring::kSetupCoopTaskrun,
    0,
};
constexpr std::uint32_t kNeeded =
    uring::kFeatureSingleMmap | uring::kFeatureNoDrop | uring::kFeatureRwCurPos;

constexpr timespec kRetryAfter{.tv_sec = 0, .tv_nsec = 1'000'000};

void store(std::uint32_t* value, std::uint32_t to) {
    std::atomic_ref(*value).store(to, std::memory_order_release);
}

[[noreturn]] void refuse(const std::string& call, int error) {
    std::string text = call + ": " + std::strerror(error);
    if (error == EPERM || error == EACCES) text += " (a sandbox or kernel.io_uring_disabled)";
    throw RingRefused(text);
}

template <class T>
T* at(void* base, std::uint32_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

Ring::Mapping::~Mapping() {
    if (address != nullptr) ::munmap(address, num_bytes);
}

void Ring::Mapping::map(int fd, std::size_t bytes, std::int64_t offset) {
    void* mapped =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (mapped == MAP_FAILED) refuse("mmap of the io_uring", errno);
    address = mapped;
    num_bytes = bytes;
    ::madvise(address, num_bytes, MADV_DONTFORK);
}

Ring::Descriptor::~Descriptor() {
    if (fd >= 0) ::close(fd);
}

Ring::Ring(unsigned entries) {
    setup(entries);
    map();
    check_that_it_runs();
}

Ring::~Ring() = default;

void Ring::setup(unsigned entries) {
    int error = 0;
    for (const auto flags : kSetupFlags) {
        params_ = {};
        params_.flags = flags;
        ring_.fd = static_cast<int>(::syscall(uring::kSysSetup, entries, &params_));
        if (ring_.fd >= 0) break;
        error = errno;
        if (error != EINVAL) break;  // EINVAL: the kernel does not know the flags
    }
    if (ring_.fd < 0) refuse("io_uring_setup", error);
    if ((params_.features & kNeeded) != kNeeded) {
        throw RingRefused("io_uring of this kernel lacks plain reads (needs Linux 5.6)");
    }
}

void Ring::map() {
    const std::size_t sq_bytes = params_.sq.array + params_.sq_entries * sizeof(std::uint32_t);
    const std::size_t cq_bytes = params_.cq.cqes + params_.cq_entries * sizeof(uring::Cqe);
    rings_.map(ring_.fd, std::max(sq_bytes, cq_bytes), uring::kOffsetSqRing);
    sqes_mapping_.map(ring_.fd, params_.sq_entries * sizeof(uring::Sqe), uring::kOffsetSqes);

    sq_head_ = at<std::uint32_t>(rings_.address, params_.sq.head);
    sq_shared_tail_ = at<std::uint32_t>(rings_.address, params_.sq.tail);
    sq_entries_ = params_.sq_entries;
    sqes_ = at<uring::Sqe>(sqes_mapping_.address, 0);
    cq_shared_head_ = at<std::uint32_t>(rings_.address, params_.cq.head);
    cq_tail_ = at<std::uint32_t>(rings_.address, params_.cq.tail);
    cq_mask_ = params_.cq_entries - 1;
    cqes_ = at<uring::Cqe>(rings_.address, params_.cq.cqes);

    auto* order = at<std::uint32_t>(rings_.address, params_.sq.array);
    for (std::uint32_t i = 0; i < sq_entries_; ++i) order[i] = i;
}

// A sandbox may permit the setup of a ring and refuse its use.
void Ring::check_that_it_runs() {
    prepare().opcode = uring::kNop;
    if (const int error = submit_and_wait(1, 0)) refuse("io_uring_enter", error);
    if (!next_completion()) throw RingRefused("io_uring did not complete a request");
}

std::uint32_t Ring::load(const std::uint32_t* value) {
    return std::atomic_ref(*const_cast<std::uint32_t*>(value)).load(std::memory_order_acquire);
}

uring::Sqe& Ring::prepare() {
    while (prepared() == sq_entries_) {
        if (submit() != 0) ::nanosleep(&kRetryAfter, nullptr);  // the kernel lacks memory
    }
    uring::Sqe& entry = sqes_[sq_tail_++ & (sq_entries_ - 1)];
    entry = {};
    return entry;
}

int Ring::submit_and_wait(unsigned wanted, std::int64_t patience_ns) {
    if (wanted > 1 && (params_.features & uring::kFeatureExtArg) != 0) {
        const uring::Timespec patience{.seconds = 0, .nanoseconds = patience_ns};
        const uring::EnterArgument argument{
            .signal_mask = 0,
            .signal_mask_bytes = 0,
            .min_wait_us = 0,
            .timespec = reinterpret_cast<std::uint64_t>(&patience),
        };
        const int error = enter(wanted, &argument);
        if (error != 0 || has_completion()) return error == ETIME ? 0 : error;
    }
    return enter(1, nullptr);
}

int Ring::enter(unsigned wait_for, const uring::EnterArgument* argument) {
    store(sq_shared_tail_, sq_tail_);
    const unsigned flags = (wait_for > 0 ? uring::kEnterGetEvents : 0) |
                           (argument != nullptr ? uring::kEnterExtArg : 0);
    const std::size_t argument_bytes = argument != nullptr ? sizeof *argument : 0;
    while (true) {
        const unsigned count = prepared();
        if (count == 0 && wait_for == 0) return 0;
        const long accepted =
            ::syscall(uring::kSysEnter, ring_.fd, count, wait_for, flags, argument, argument_bytes);
        if (accepted < 0 && errno != EINTR) return errno;
        if (accepted >= 0 && prepared() == 0) return 0;
        // The kernel stops at a wrong entry, reports it in its completion, and takes the next
        // entries in the next call. It waits only if it took all.
        if (accepted == 0) return EAGAIN;
    }
}

std::optional<uring::Cqe> Ring::next_completion() {
    if (!has_completion()) return std::nullopt;
    const uring::Cqe completion = cqes_[cq_head_ & cq_mask_];
    store(cq_shared_head_, ++cq_head_);
    return completion;
}

bool Ring::has_completion() const {
    return cq_head_ != load(cq_tail_);
}

int Ring::register_buffer(unsigned number, iovec memory) {
    if (number >= kMaxBuffers) return ENOSPC;
    if (const int error = register_table()) return error;
    uring::BuffersUpdate update{};
    update.first = number;
    update.iovecs = reinterpret_cast<std::uint64_t>(&memory);
    update.count = 1;
    return register_(uring::kUpdateBuffers, &update, sizeof update);
}

// Registers a table of empty buffers, so that each can be registered while requests are in flight.
int Ring::register_table() {
    if (has_table_) return 0;
    const std::vector<iovec> empty(kMaxBuffers);
    const int error = register_(uring::kRegisterBuffers, empty.data(), kMaxBuffers);
    has_table_ = error == 0;
    return error == EFAULT || error == EINVAL ? EOPNOTSUPP : error;  // no empty buffers
}

int Ring::register_(unsigned opcode, const void* argument, unsigned count) {
    while (true) {
        if (::syscall(uring::kSysRegister, ring_.fd, opcode, argument, count) >= 0) return 0;
        if (errno != EINTR) return errno;
    }
}

}  // namespace aiokv
