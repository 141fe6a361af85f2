#include "aiokv/group_pool.hpp"

#include <algorithm>

#include "report.hpp"

namespace aiokv {

GroupPool::GroupPool(std::uint32_t capacity, std::uint32_t tail_blocks, std::uint32_t head_blocks)
    : ids_(capacity), tail_blocks_(tail_blocks), head_blocks_(head_blocks), entries_(capacity) {}

bool GroupPool::take(BlockId& id) {
    const bool evicts = ids_.free_blocks() == 0;
    if (evicts) {
        const BlockId victim = oldest_;
        detach(victim);
        ids_.give_back(victim);
    }
    ids_.take({&id, 1});
    return evicts;
}

bool GroupPool::take_writable(BlockId& id) {
    BlockId victim = ids_.writable_blocks() > 0 ? kNoBlock : oldest_;
    while (victim != kNoBlock && !ids_.is_writable(victim)) victim = evicted_after(victim);
    if (victim == kNoBlock) return take(id);
    detach(victim);
    id = victim;
    return true;
}

void GroupPool::give_back(BlockId id, Step step) {
    ids_.use_in(id, step);
    ids_.give_back(id);
}

void GroupPool::attach(NodeId node, BlockId id) {
    entries_[at(id)].node = node;
    ids_of_[node] = id;
    note_use(id);
    link(id);
}

BlockId GroupPool::find(NodeId node) const {
    const auto found = ids_of_.find(node);
    return found == ids_of_.end() ? kNoBlock : found->second;
}

bool GroupPool::covers(const PrefixTree& tree, std::span<const NodeId> path, std::size_t blocks,
                       const GroupPool* copies) const {
    const auto has_id = [&](NodeId node) {
        return tree[node].has(kHasSides) &&
               (find(node) != kNoBlock || (copies != nullptr && copies->find(node) != kNoBlock));
    };
    const std::span<const NodeId> hit = path.first(blocks);
    const std::span<const NodeId> head = hit.first(std::min<std::size_t>(blocks, head_blocks_));
    const std::span<const NodeId> tail = hit.last(std::min<std::size_t>(blocks, tail_blocks_));
    return std::all_of(head.begin(), head.end(), has_id) &&
           std::all_of(tail.begin(), tail.end(), has_id);
}

// A hit does not need the blocks between head and tail.
void GroupPool::touch_hit(std::span<const NodeId> path) {
    const std::size_t head = std::min<std::size_t>(path.size(), head_blocks_);
    const std::size_t tail = std::min<std::size_t>(path.size(), tail_blocks_);
    const auto touch_node = [this](NodeId node) {
        const BlockId id = find(node);
        if (id != kNoBlock) touch(id);
    };
    for (std::size_t i = path.size(); i-- > path.size() - tail;) touch_node(path[i]);
    for (std::size_t i = head; i-- > 0;) touch_node(path[i]);
}

bool GroupPool::forget(NodeId node) {
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

void GroupPool::forget_all() {
    while (oldest_ != kNoBlock) forget(entries_[at(oldest_)].node);
}

void GroupPool::detach(BlockId id) {
    unlink(id);
    ids_of_.erase(entries_[at(id)].node);
    entries_[at(id)].node = kNone;
}

void GroupPool::add_reader(BlockId id) {
    if (entries_[at(id)].readers++ == 0) unlink(id);
}

void GroupPool::remove_reader(BlockId id) {
    Entry& entry = entries_[at(id)];
    note_use(id);
    if (--entry.readers > 0) return;
    if (entry.node == kNone) {
        ids_.give_back(id);
    } else {
        link(id);
    }
}

void GroupPool::remove_copier(BlockId id) {
    Entry& entry = entries_[at(id)];
    if (--entry.readers > 0) return;
    if (entry.node == kNone) return ids_.give_back(id);
    BlockId before = newest_;
    while (before != kNoBlock && used_[at(before)] > used_[at(id)]) {
        before = entries_[at(before)].prev;
    }
    link_behind(id, before);
}

void GroupPool::touch(BlockId id) {
    note_use(id);
    if (!is_idle(id)) return;
    unlink(id);
    link(id);
}

void GroupPool::link(BlockId id) {
    Entry& entry = entries_[at(id)];
    entry.prev = newest_;
    entry.next = kNoBlock;
    (newest_ == kNoBlock ? oldest_ : entries_[at(newest_)].next) = id;
    newest_ = id;
    ++idle_;
}

// Links an idle id into the eviction order right after `before`, or first if `before` is kNoBlock.
void GroupPool::link_behind(BlockId id, BlockId before) {
    if (before == newest_) return link(id);
    Entry& entry = entries_[at(id)];
    BlockId& next = before == kNoBlock ? oldest_ : entries_[at(before)].next;
    entry.prev = before;
    entry.next = next;
    entries_[at(next)].prev = id;
    next = id;
    ++idle_;
}

void GroupPool::unlink(BlockId id) {
    Entry& entry = entries_[at(id)];
    (entry.prev == kNoBlock ? oldest_ : entries_[at(entry.prev)].next) = entry.next;
    (entry.next == kNoBlock ? newest_ : entries_[at(entry.next)].prev) = entry.prev;
    entry.prev = entry.next = kNoBlock;
    --idle_;
}

void GroupPool::check(Report& report, Ownership ids, std::span<const std::uint32_t> readers,
                      const PrefixTree& tree) const {
    std::uint32_t attached = 0;
    for (BlockId id = 0; static_cast<std::uint32_t>(id) < capacity(); ++id) {
        const Entry& entry = entries_[at(id)];
        const std::uint32_t held = readers[at(id)];
        if (is_attached(id) || held > 0) ids.own(id, "a node");
        report.require(entry.readers == held, "I5: ", ids.tier(), " id ", id, " counts ",
                       entry.readers, " readers of ", held);
        if (!is_attached(id)) continue;
        ++attached;
        const bool live = tree.is_live(entry.node) && !tree[entry.node].has(kDetached | kRoot);
        report.require(live && tree[entry.node].has(kHasSides) && find(entry.node) == id,
                       "I2: the node of ", ids.tier(), " id ", id, " does not know it");
    }
    report.require(attached == this->attached(), "I1: ", this->attached(), " of ", attached, " ",
                   ids.tier(), " ids of nodes are listed");
    ids.check([this](BlockId id) { return is_free(id); });
}

}  // namespace aiokv
