#include "ring_backend.hpp"

#include <algorithm>
#include <cerrno>
#include <unordered_set>

namespace aiokv {
namespace {

constexpr std::uint64_t kCancellation = ~std::uint64_t{0};  // user data, where others have a slot

}  // namespace

RingBackend::RingBackend(std::size_t entries)
    : ring_(static_cast<unsigned>(entries), event_.fd()), transfers_(entries) {
    for (std::size_t slot = entries; slot-- > 0;) free_.push_back(static_cast<Slot>(slot));
    event_.drain();
}

int RingBackend::register_buffer(std::uint64_t address, std::size_t num_bytes) {
    RegisteredBuffers more = buffers_.with(address, num_bytes);
    const auto& iovecs = more.iovecs();
    const int error = ring_.register_buffers(iovecs.data(), static_cast<unsigned>(iovecs.size()));
    if (error == 0) {
        buffers_ = std::move(more);
        return 0;
    }
    const auto& before = buffers_.iovecs();
    if (ring_.register_buffers(before.data(), static_cast<unsigned>(before.size())) != 0) {
        buffers_ = {};
    }
    return error;
}

void RingBackend::submit(std::span<const IoRequest> requests) {
    waiting_.insert(waiting_.end(), requests.begin(), requests.end());
    start_waiting();
}

void RingBackend::cancel(std::span<const std::uint64_t> tags) {
    const std::unordered_set<std::uint64_t> wanted(tags.begin(), tags.end());
    const auto is_wanted = [&](const IoRequest& request) { return wanted.contains(request.tag); };
    for (const auto& request : waiting_) {
        if (is_wanted(request)) finished_.push_back({request.tag, -ECANCELED});
    }
    std::erase_if(waiting_, is_wanted);

    std::vector<bool> is_free(transfers_.size());
    for (const Slot slot : free_) is_free[slot] = true;
    for (Slot slot = 0; slot < transfers_.size(); ++slot) {
        Transfer& transfer = transfers_[slot];
        if (is_free[slot] || transfer.cancelled() || !is_wanted(transfer.request())) continue;
        transfer.cancel();
        if (uring::Sqe* entry = ring_.prepare()) {
            entry->opcode = uring::kAsyncCancel;
            entry->fd = -1;
            entry->address = slot;
            entry->user_data = kCancellation;
            ++in_kernel_;
        }
    }
    submit_prepared();
    if (!finished_.empty()) event_.signal();
}

void RingBackend::reap(std::vector<IoResult>& results, std::size_t limit) {
    event_.drain();
    ring_.collect();
    while (ring_.has_completion() && finished_.size() < limit) finish_next();
    start_waiting();
    const std::size_t count = std::min(limit, finished_.size());
    const auto end = finished_.begin() + static_cast<std::ptrdiff_t>(count);
    results.insert(results.end(), finished_.begin(), end);
    finished_.erase(finished_.begin(), end);
    if (!finished_.empty() || ring_.has_completion()) event_.signal();
}

void RingBackend::close() {
    for (const auto& request : waiting_) finished_.push_back({request.tag, -ECANCELED});
    waiting_.clear();
    for (Transfer& transfer : transfers_) transfer.cancel();  // a short one is not continued
    submit_prepared();
    while (in_kernel_ > 0) {
        if (!ring_.has_completion()) ring_.enter(1);
        while (ring_.has_completion()) finish_next();
    }
    ring_.register_buffers(nullptr, 0);
}

void RingBackend::finish_next() {
    const uring::Cqe completion = *ring_.next_completion();
    --in_kernel_;
    if (completion.user_data == kCancellation) return;
    const auto slot = static_cast<Slot>(completion.user_data);
    Transfer& transfer = transfers_[slot];
    if (transfer.advance(completion.result)) {
        finished_.push_back(transfer.result());
        free_.push_back(slot);
    } else {
        continued_.push_back(slot);
    }
}

void RingBackend::start_waiting() {
    while (!continued_.empty() && start(continued_.back())) continued_.pop_back();
    while (!waiting_.empty() && !free_.empty()) {
        const Slot slot = free_.back();
        transfers_[slot] = Transfer(waiting_.front());
        if (!start(slot)) break;
        free_.pop_back();
        waiting_.pop_front();
    }
    submit_prepared();
}

bool RingBackend::start(Slot slot) {
    uring::Sqe* entry = ring_.prepare();
    if (entry == nullptr) return false;
    const Transfer& transfer = transfers_[slot];
    entry->fd = transfer.request().fd;
    entry->user_data = slot;
    ++in_kernel_;
    if (transfer.request().operation == IoOperation::kFlush) {
        entry->opcode = uring::kFsync;
        entry->op_flags = uring::kFsyncDatasync;
        return true;
    }
    const bool writes = transfer.request().operation == IoOperation::kWrite;
    entry->address = transfer.address();
    entry->length = transfer.length();
    entry->offset = transfer.offset();
    if (const auto buffer = buffers_.find(transfer.address(), transfer.length())) {
        entry->opcode = writes ? uring::kWriteFixed : uring::kReadFixed;
        entry->buffer_index = *buffer;
    } else {
        entry->opcode = writes ? uring::kWrite : uring::kRead;
    }
    return true;
}

void RingBackend::submit_prepared() {
    if (ring_.prepared() == 0) return;
    // The kernel lacks memory or has too many completions: the next reap() tries again.
    if (ring_.enter() != 0) event_.signal();
}

}  // namespace aiokv
