#include "ring_loop.hpp"

#include <poll.h>
#include <time.h>

#include <cerrno>
#include <utility>

namespace aiokv {
namespace {

// User data of entries that are not transfers. The user data of a transfer is its slot.
constexpr std::uint64_t kCommands = ~std::uint64_t{0};
constexpr std::uint64_t kCancellation = kCommands - 1;
constexpr timespec kRetryAfter{.tv_sec = 0, .tv_nsec = 1'000'000};
// Limit of the written bytes in the kernel while reads are expected, because the medium finishes
// these writes before a later read. After kManyWrites writes without a read, no reads are expected.
constexpr std::size_t kMostWrittenBytes = std::size_t{32} << 20;
constexpr std::size_t kManyWrites = 1024;

std::size_t bytes_to_write(const IoJob& job) {
    return job.request.operation == IoOperation::kWrite ? job.request.length : 0;
}

}  // namespace

// The ring has room for all transfers, their cancellations, and one entry that watches commands.
RingLoop::RingLoop(std::size_t entries, RingCommands& commands, IoCompletions& completions)
    : commands_(commands),
      completions_(completions),
      ring_(static_cast<unsigned>(2 * entries + 1)),
      transfers_(entries) {
    for (std::size_t slot = entries; slot-- > 0;) free_.push_back(static_cast<Slot>(slot));
}

void RingLoop::run() {
    while (true) {
        RingCommands::Taken taken = commands_.take();
        if (taken.closing || !taken.cancelled_tags.empty()) cancel(taken);
        if (taken.registration) register_buffer(*taken.registration);
        start_jobs();
        if (!taken.closing) {
            watch_commands();
        } else if (in_kernel_ == 0) {
            return;
        }
        wait();
    }
}

void RingLoop::cancel(const RingCommands::Taken& taken) {
    for (Slot slot = 0; slot < transfers_.size(); ++slot) {
        Transfer& transfer = transfers_[slot];
        if (transfer.ended() || transfer.cancelled()) continue;
        const std::uint64_t tag = transfer.job().request.tag;
        if (!taken.closing && !taken.cancelled_tags.contains(tag)) continue;
        transfer.cancel();
        uring::Sqe& entry = ring_.prepare();
        entry.opcode = uring::kAsyncCancel;
        entry.fd = -1;
        entry.address = slot;
        entry.user_data = kCancellation;
        ++in_kernel_;
    }
}

// After a refusal, no more memory is registered: the reason, often RLIMIT_MEMLOCK, is still there.
void RingLoop::register_buffer(const Registration& registration) {
    const auto [address, num_bytes, job, is_last] = registration;
    if (refusal_ == 0) {
        refusal_ =
            ring_.register_buffer(buffers_.size(), {reinterpret_cast<void*>(address), num_bytes});
        if (refusal_ == 0) buffers_.add(address, num_bytes);
    }
    if (is_last) completions_.end(job, -refusal_);
}

void RingLoop::start_jobs() {
    for (const Slot slot : std::exchange(continued_, {})) {
        if (transfers_[slot].stop_if_cancelled()) {
            end(slot);
        } else {
            start(slot);
        }
    }
    commands_.take_jobs([this] { return !free_.empty(); }, [this] { return may_write(); },
                        [this](const IoJob& job) {
                            count(job);
                            const Slot slot = free_.back();
                            free_.pop_back();
                            transfers_[slot] = Transfer(job);
                            start(slot);
                        });
}

bool RingLoop::may_write() const {
    return written_bytes_ < kMostWrittenBytes || writes_since_read_ >= kManyWrites;
}

void RingLoop::count(const IoJob& job) {
    written_bytes_ += bytes_to_write(job);
    const bool reads = job.request.operation == IoOperation::kRead;
    writes_since_read_ = reads ? 0 : writes_since_read_ + 1;
}

void RingLoop::start(Slot slot) {
    const Transfer& transfer = transfers_[slot];
    const IoRequest& request = transfer.job().request;
    uring::Sqe& entry = ring_.prepare();
    entry.fd = request.fd;
    entry.user_data = slot;
    ++in_kernel_;
    if (request.operation == IoOperation::kFlush) {
        entry.opcode = uring::kFsync;
        entry.op_flags = uring::kFsyncDatasync;
        return;
    }
    const bool writes = request.operation == IoOperation::kWrite;
    entry.address = transfer.address();
    entry.length = transfer.length();
    entry.offset = transfer.offset();
    if (const auto buffer = buffers_.find(transfer.address(), transfer.length())) {
        entry.opcode = writes ? uring::kWriteFixed : uring::kReadFixed;
        entry.buffer_index = *buffer;
    } else {
        entry.opcode = writes ? uring::kWrite : uring::kRead;
    }
}

void RingLoop::watch_commands() {
    if (watches_commands_) return;
    uring::Sqe& entry = ring_.prepare();
    entry.opcode = uring::kPollAdd;
    entry.fd = commands_.fd();
    entry.op_flags = POLLIN;
    entry.user_data = kCommands;
    watches_commands_ = true;
    ++in_kernel_;
}

void RingLoop::wait() {
    if (ring_.submit_and_wait(pace_.wanted(in_kernel_), WakePace::kPatienceNs) != 0 &&
        !ring_.has_completion()) {
        ::nanosleep(&kRetryAfter, nullptr);  // the kernel lacks memory for requests
    }
    std::size_t num_ended = 0;
    while (const auto completion = ring_.next_completion()) {
        handle(*completion);
        ++num_ended;
    }
    pace_.count(num_ended, in_kernel_ > 0);
}

void RingLoop::handle(const uring::Cqe& completion) {
    --in_kernel_;
    if (completion.user_data == kCancellation) return;
    if (completion.user_data == kCommands) {
        watches_commands_ = false;
        commands_.drain();
        return;
    }
    const auto slot = static_cast<Slot>(completion.user_data);
    if (transfers_[slot].advance(completion.result)) {
        end(slot);
    } else {
        continued_.push_back(slot);
    }
}

void RingLoop::end(Slot slot) {
    written_bytes_ -= bytes_to_write(transfers_[slot].job());
    completions_.end(transfers_[slot].job(), transfers_[slot].result());
    free_.push_back(slot);
}

}  // namespace aiokv
