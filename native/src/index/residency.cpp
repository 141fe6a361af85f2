// Eviction and dropping.
#include <algorithm>
#include <array>

#include "aiokv/residency.hpp"

namespace aiokv {

const char* name_of(EvictionCause cause) {
    constexpr std::array<const char*, kEvictionCauses> names = {"capacity", "request", "resize",
                                                                "sleep",    "reset",   "failure"};
    return names[static_cast<std::size_t>(cause)];
}

Residency::Residency(const CoreConfig& config, Index& index, StoredBlocks& stored,
                     AuxiliaryGroups& auxiliary, DevicePool& device, RunPool& host,
                     BlockEvents& events)
    : config_(config),
      index_(index),
      stored_(stored),
      tree_(index.tree()),
      auxiliary_(auxiliary),
      device_(device),
      host_(host),
      events_(events),
      host_copies_(config.host_blocks),
      evictable_(config, tree_) {}

// Frees a detached node when nothing uses it. Leases use its device copy only, and no swapped lease
// can be resumed with it. Without a device copy, transfers that hold the node may read the host
// copy.
void Residency::free_if_unowned(NodeId node, NodeId evicted_from) {
    Node& n = tree_[node];
    if (n.pins > 0) return;
    if (n.holds > 0 && (config_.external_device || stored_.has(node, kSaving))) return;
    if (n.host != kNoBlock) {
        host_copies_.remove(n.host);
        host_.give_back(n.host);
    }
    n.host = kNoBlock;
    n.clear(kHostValid);
    if (tree_.refs(node) > 0) return;
    if (n.device != kNoBlock) {
        device_.give_back(n.device);
        --device_nodes_;
    }
    n.device = kNoBlock;
    if (n.holds == 0) tree_.free(node, evicted_from);
}

// Makes the node unmatchable, and frees copies that no lease and no transfer uses. `evicted_from`:
// its parent, if the history shall remember the block.
void Residency::detach(NodeId node, NodeId evicted_from) {
    Node& n = tree_[node];
    evictable_.dequeue(tree_.run_of(node));  // all of it: the blocks below are dropped, too
    n.set(kDetached);
    events_.changed(node);
    n.clear(kBackupQueued);
    if (n.has(kHostValid)) host_copies_.remove(n.host);
    if (n.has(kHasSides)) auxiliary_.forget(node);
    tree_.forget_children(node);
    ++uncounted_.dropped;
    free_if_unowned(node, evicted_from);
}

// Detaches a node, which has left its parent `above`, and all below it. The history needs a block
// after the blocks below it.
void Residency::drop_subtree(NodeId top, NodeId above) {
    scratch_.assign(1, top);
    for (std::size_t i = 0; i < scratch_.size(); ++i) {
        tree_.for_each_child(scratch_[i], [&](NodeId child) { scratch_.push_back(child); });
    }
    for (; !scratch_.empty(); scratch_.pop_back()) {
        const NodeId node = scratch_.back();
        detach(node, node == top ? above : tree_.parent(node));
    }
}

// Drops a node and all below it.
void Residency::drop(NodeId node) {
    evictable_.end_touch();
    const NodeId parent = tree_.parent(node);
    tree_.unlink(node);
    if (!tree_.has_child(node)) {
        detach(node, parent);
    } else {
        drop_subtree(node, parent);
    }
    index_.change();
    note_lost_child(parent);
}

void Residency::note_lost_child(NodeId parent) {
    if (tree_[parent].has(kRoot)) {
        index_.close_context_if_unused(parent);
    } else {
        evictable_.requeue_if_free(parent);
    }
}

void Residency::release_device_copy(NodeId node) {
    Node& n = tree_[node];
    evictable_.dequeue_block(node);
    device_.give_back(n.device);
    n.device = kNoBlock;
    --device_nodes_;
    lose(node, kDeviceValid);
    tree_.count_device_child(node, -1);
    ++uncounted_.evicted_device;
    tree_.evicted().set_from_host(false);
    if (!n.has(kHostValid)) return drop(node);
    host_copies_.remove(n.host);
    index_.change();
    evictable_.enqueue_block(node);
    evictable_.requeue_if_free(tree_.parent(node));
}

void Residency::count_as(EvictionCause cause) {
    evicted_device_.add(cause, uncounted_.evicted_device);
    evicted_host_.add(cause, uncounted_.evicted_host);
    dropped_.add(cause, uncounted_.dropped);
    uncounted_ = {};
}

bool Residency::evict_one_device(Unsaved unsaved) {
    for (NodeId node; (node = evictable_.device_front()) != kNone;) {
        const Node& n = tree_[node];
        if (n.pins == 0 && !tree_.has_device_child(node)) {
            if (unsaved == Unsaved::kKept && must_save(node)) {
                stopped_at_unsaved_ = true;
                return false;
            }
            release_device_copy(node);
            return true;
        }
        if (waits_for_save(node)) return false;
        defer(node, true);
    }
    return false;
}

// Defers a blocked block at the front of its queue, and those above it in its run, because each of
// them has a child. If eviction stops at saves, blocks that wait for a save stay in the queue, and
// so do the blocks above them.
void Residency::defer(NodeId front, bool stops_at_saves) {
    NodeId from = front;
    const NodeId first = tree_.run(front).first;
    while (from > first && !(stops_at_saves && waits_for_save(from - 1))) --from;
    evictable_.defer(tree_.split_before(from));
}

// Returns how many blocks of a run, counted upwards from `last`, satisfy `is`; at most `most`.
template <class Is>
std::uint32_t Residency::count_up(NodeId last, std::uint32_t most, Is is) const {
    most = std::min(most, last - tree_.run(last).first + 1);
    const Node* const deepest = &tree_[last];  // the blocks of a run have consecutive slots
    std::uint32_t count = 0;
    while (count < most && is(*(deepest - count))) ++count;
    return count;
}

// Makes a block unmatchable that leaves the tree.
void Residency::forget(NodeId node) {
    Node& n = tree_[node];
    n.flags = (n.flags & ~std::uint32_t{kBackupQueued}) | kDetached;
    events_.changed(node);
}

// Removes the last `count` blocks of a run, which were forgotten, from the tree.
void Residency::trim(RunId id, std::uint32_t count) {
    const Run run = tree_.runs()[id];
    uncounted_.dropped += count;
    index_.change();
    evictable_.trim(id, count);
    if (count == run.length) note_lost_child(run.parent);
}

// Evicts blocks of one run at the front of the device queue that have no other copy and that
// nothing needs; at most `most`. Returns their number.
std::uint32_t Residency::evict_plain(std::uint32_t most) {
    const NodeId last = evictable_.device_front();
    if (last == kNone || config_.write_policy != SavePolicy::kNone) return 0;
    const RunId id = tree_.run_of(last);
    const Run& run = tree_.runs()[id];
    if (run.child != kNone || run.has(kMayBeAhead)) return 0;
    tree_.prefetch_tag(run.first);  // to be removed from the children of its parent
    const std::uint32_t count = count_up(last, most, [](const Node& n) { return n.is_plain(); });
    if (count == 0) return 0;
    const Node* const node = &tree_[last];
    device_.give_back_all(count, [node](std::uint32_t i) { return (node - i)->device; });
    for (std::uint32_t i = 0; events_.has_streams() && i < count; ++i) forget(last - i);
    device_nodes_ -= count;
    uncounted_.evicted_device += count;
    tree_.evicted().set_from_host(false);
    trim(id, count);
    return count;
}

// Does the same as evict_plain() for blocks with a host copy, which stay on the host.
std::uint32_t Residency::evict_clean(std::uint32_t most) {
    const NodeId last = evictable_.device_front();
    if (last == kNone || tree_.has_device_child(last)) return 0;
    const std::uint32_t count =
        count_up(last, most, [](const Node& n) { return n.has(kHostValid) && n.pins == 0; });
    if (count == 0) return 0;
    const NodeId first = last - count + 1;
    const RunId id = tree_.split_before(first);
    evictable_.dequeue(id);
    const Node* const deepest = &tree_[last];
    device_.give_back_all(count, [deepest](std::uint32_t i) { return (deepest - i)->device; });
    for (NodeId node = last + 1; node-- > first;) {
        tree_[node].device = kNoBlock;
        host_copies_.remove(tree_[node].host);
        lose(node, kDeviceValid);
    }
    tree_.count_device_child(first, -1);
    device_nodes_ -= count;
    uncounted_.evicted_device += count;
    index_.change();
    const NodeId parent = tree_.parent(first);
    evictable_.enqueue(id);
    evictable_.requeue_if_free(parent);
    return count;
}

// Evicts at least one block, at most `most`. Returns their number, or 0 if none can be evicted now.
std::uint32_t Residency::evict_some_device(std::uint32_t most, Unsaved unsaved) {
    if (const std::uint32_t count = evict_plain(most); count > 0) return count;
    if (const std::uint32_t count = evict_clean(most); count > 0) return count;
    return evict_one_device(unsaved);
}

// Evicts host blocks of one run that nothing needs, or one block; at most `most`. Returns their
// number.
std::uint32_t Residency::evict_some_host(std::uint32_t most) {
    const NodeId last = evictable_.host_front();
    if (last == kNone) return 0;
    tree_.evicted().set_from_host(true);
    const std::uint32_t count = tree_.has_child(last) ? 0 : count_up(last, most, [](const Node& n) {
        return n.device == kNoBlock && n.pins == 0 && n.holds == 0 && !n.has(kHasSides);
    });
    if (count == 0) return evict_one_host();
    for (std::uint32_t i = 0; i < count; ++i) {
        evicted_unsaved_ += stored_.awaits_save(last - i);
        host_.give_back(tree_[last - i].host);
        forget(last - i);
    }
    uncounted_.evicted_host += count;
    trim(tree_.run_of(last), count);
    return count;
}

bool Residency::evict_one_host() {
    for (NodeId node; (node = evictable_.host_front()) != kNone;) {
        const Node& n = tree_[node];
        if (n.pins == 0 && n.holds == 0 && !tree_.has_child(node)) {
            ++uncounted_.evicted_host;
            evicted_unsaved_ += stored_.awaits_save(node);
            drop(node);
            return true;
        }
        defer(node, false);
    }
    return false;
}

bool Residency::make_room(std::uint32_t blocks, Unsaved unsaved, LeaseId demand) {
    stopped_at_unsaved_ = false;
    if (device_.free_blocks() >= blocks) return true;
    begin_eviction(EvictionCause::kCapacity, demand);
    while (device_.free_blocks() < blocks &&
           evict_some_device(blocks - device_.free_blocks(), unsaved) > 0) {
    }
    count_as(EvictionCause::kCapacity);
    return device_.free_blocks() >= blocks;
}

std::uint32_t Residency::evict_device(std::uint32_t blocks) {
    begin_eviction(EvictionCause::kRequest);
    std::uint32_t evicted = 0;
    while (evicted < blocks) {
        const std::uint32_t more = evict_some_device(blocks - evicted, Unsaved::kKept);
        if (more == 0) break;
        evicted += more;
    }
    count_as(EvictionCause::kRequest);
    return evicted;
}

std::uint32_t Residency::evict_host(std::uint32_t blocks) {
    begin_eviction(EvictionCause::kRequest);
    std::uint32_t evicted = 0;
    while (evicted < blocks) {
        const std::uint32_t more = evict_some_host(blocks - evicted);
        if (more == 0) break;
        evicted += more;
    }
    count_as(EvictionCause::kRequest);
    return evicted;
}

}  // namespace aiokv
