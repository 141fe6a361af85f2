#include "aiokv/side_pool.hpp"

namespace aiokv {

SidePool::SidePool(std::uint32_t capacity, std::uint32_t tail_blocks, std::uint32_t head_blocks)
    : ids_(capacity), tail_blocks_(tail_blocks), head_blocks_(head_blocks), entries_(capacity) {}

bool SidePool::take(BlockId& id) {
    const bool evicts = ids_.free_blocks() == 0;
    if (evicts) {
        const BlockId victim = oldest_;
        detach(victim);
        ids_.give_back(victim);
    }
    ids_.take({&id, 1});
    return evicts;
}

void SidePool::give_back(BlockId id, Step step) {
    ids_.use_in(id, step);
    ids_.give_back(id);
}

void SidePool::attach(NodeId node, BlockId id) {
    entries_[at(id)].node = node;
    ids_of_[node] = id;
    link(id);
}

BlockId SidePool::find(NodeId node) const {
    const auto found = ids_of_.find(node);
    return found == ids_of_.end() ? kNoBlock : found->second;
}

bool SidePool::forget(NodeId node) {
    const BlockId id = find(node);
    if (id == kNoBlock) return false;
    if (is_idle(id)) {
        detach(id);
        ids_.give_back(id);
    } else {
        ids_of_.erase(node);
        entries_[at(id)].node = kNone;
    }
    return true;
}

void SidePool::forget_all() {
    while (oldest_ != kNoBlock) forget(entries_[at(oldest_)].node);
}

void SidePool::detach(BlockId id) {
    unlink(id);
    ids_of_.erase(entries_[at(id)].node);
    entries_[at(id)].node = kNone;
}

void SidePool::hold(BlockId id) {
    if (entries_[at(id)].holds++ == 0) unlink(id);
}

void SidePool::unhold(BlockId id) {
    Entry& entry = entries_[at(id)];
    if (--entry.holds > 0) return;
    if (entry.node == kNone) {
        ids_.give_back(id);
    } else {
        link(id);
    }
}

void SidePool::touch(BlockId id) {
    if (!is_idle(id)) return;
    unlink(id);
    link(id);
}

void SidePool::link(BlockId id) {
    Entry& entry = entries_[at(id)];
    entry.prev = newest_;
    entry.next = kNoBlock;
    (newest_ == kNoBlock ? oldest_ : entries_[at(newest_)].next) = id;
    newest_ = id;
    ++idle_;
}

void SidePool::unlink(BlockId id) {
    Entry& entry = entries_[at(id)];
    (entry.prev == kNoBlock ? oldest_ : entries_[at(entry.prev)].next) = entry.next;
    (entry.next == kNoBlock ? newest_ : entries_[at(entry.next)].prev) = entry.prev;
    entry.prev = entry.next = kNoBlock;
    --idle_;
}

}  // namespace aiokv
