#include "aiokv/evicted_runs.hpp"

#include <algorithm>

#include "aiokv/tick_clock.hpp"

namespace aiokv {

void EvictedRuns::begin_eviction(EvictionCause cause, std::uint64_t demand) {
    if (limit_ > 0) reason_ = {tick_nanoseconds(), demand, cause, false};
}

void EvictedRuns::change_reasons(const std::unordered_map<NodeId, NodeId>& moved) {
    for (RunId id = oldest_; id != kNoRun; id = runs_[id].newer) {
        runs_[id].eviction = reason_;
        const auto parent = moved.find(runs_[id].parent);
        if (parent == moved.end()) continue;
        unlink(id);
        runs_[id].parent = parent->second;
        link(id);
        note_above(parent->second);
    }
}

void EvictedRuns::link(RunId id) {
    RunId& head = buckets_[bucket(runs_[id].parent, runs_[id].tag)];
    runs_[id].next = std::exchange(head, id);
}

void EvictedRuns::unlink(RunId id) {
    RunId* at = &buckets_[bucket(runs_[id].parent, runs_[id].tag)];
    while (*at != id) at = &runs_[*at].next;
    *at = runs_[id].next;
}

void EvictedRuns::grow() {
    buckets_.assign(std::max<std::size_t>(buckets_.size() * 2, 256), kNoRun);
    for (RunId id = oldest_; id != kNoRun; id = runs_[id].newer) link(id);
}

void EvictedRuns::note_above(NodeId slot) {
    if (slot >= above_.size()) above_.resize(std::size_t{slot} * 5 / 4 + 64, false);
    above_[slot] = true;
}

void EvictedRuns::leave_root(NodeId parent) {
    if (below_roots_.empty()) return;
    const auto root = below_roots_.find(parent);
    if (root == below_roots_.end() || --root->second > 0) return;
    below_roots_.erase(root);
    bare_roots_.push_back(parent);
}

void EvictedRuns::add(NodeId first, std::uint32_t length, NodeId parent, bool is_root,
                      std::uint32_t tag) {
    if (used_ >= buckets_.size()) grow();
    RunId id = free_;
    if (id == kNoRun) {
        id = static_cast<RunId>(runs_.size());
        runs_.emplace_back();
    } else {
        free_ = runs_[id].next;
    }
    runs_[id] = Run{first, length, parent, tag, kNoRun, newest_, kNoRun, reason_};
    (newest_ == kNoRun ? oldest_ : runs_[newest_].newer) = id;
    newest_ = id;
    link(id);
    ++used_;
    blocks_ += length;
    note_above(parent);
    if (is_root) ++below_roots_[parent];
}

void EvictedRuns::take_front(RunId id, std::uint32_t count, std::uint32_t tag) {
    Run& run = runs_[id];
    unlink(id);
    blocks_ -= count;
    leave_root(run.parent);
    if (count < run.length) {
        run.first += count;
        run.length -= count;
        run.parent = run.first - 1;
        run.tag = tag;
        note_above(run.parent);
        return link(id);
    }
    (run.older == kNoRun ? oldest_ : runs_[run.older].newer) = run.newer;
    (run.newer == kNoRun ? newest_ : runs_[run.newer].older) = run.older;
    run = Run{};
    run.next = std::exchange(free_, id);
    --used_;
}

void EvictedRuns::clear() {
    const Eviction reason = reason_;
    std::vector<bool> first_tokens = std::move(first_tokens_);
    *this = EvictedRuns(limit_);
    first_tokens_ = std::move(first_tokens);
    reason_ = reason;
}

void EvictedRuns::forget_children(NodeId first, std::uint32_t count) {
    if (first >= above_.size()) return;
    const std::size_t end = std::min<std::size_t>(above_.size(), std::size_t{first} + count);
    std::fill(above_.begin() + first, above_.begin() + static_cast<std::ptrdiff_t>(end), false);
}

std::size_t EvictedRuns::bytes() const {
    return runs_.capacity() * sizeof(Run) + buckets_.capacity() * sizeof(RunId) +
           (above_.capacity() + first_tokens_.capacity()) / 8;
}

}  // namespace aiokv
