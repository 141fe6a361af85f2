// Room for host copies: which of them make room for others, and which blocks are saved next.
#include <algorithm>
#include <iterator>

#include "aiokv/residency.hpp"

namespace aiokv {

void Residency::list_host_copy(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kDetached) && n.has(kHostValid) && n.has(kDeviceValid) && n.holds == 0) {
        // The device evicts blocks without refs soon, and blocks with refs last.
        tree_.refs(node) > 0 ? host_copies_.add_first(n.host, node)
                             : host_copies_.add_last(n.host, node);
    }
}

// Returns true if eviction may wait for a save of the node. A save of a block of the open step
// begins when the step is closed, which may depend on the caller. So only write-back waits for it;
// the other policies evict the block unsaved.
bool Residency::can_save(NodeId node) const {
    return config_.write_policy == SavePolicy::kWriteBack ||
           device_.is_writable(tree_[node].device);
}

// Returns true if evicting the node now would lose a block that the write policy must save.
bool Residency::must_save(NodeId node) const {
    const Node& n = tree_[node];
    if (config_.write_policy == SavePolicy::kNone || n.has(kHostValid | kBackupFailed) ||
        !can_save(node)) {
        return false;
    }
    return host_.free_blocks() > 0 || !host_copies_.empty() || evictable_.queued_host() > 0;
}

void Residency::fit_early_copies(std::vector<NodeId>& nodes) {
    if (nodes.size() <= host_.free_blocks()) return;
    if (stored_.exist()) {
        const auto rest = std::stable_partition(
            nodes.begin(), nodes.end(), [this](NodeId node) { return stored_.is_due(node); });
        const auto due = static_cast<std::size_t>(rest - nodes.begin());
        reclaim_host_copies(due, [this](NodeId node) { return stored_.awaits_save(node); });
        evict_host_until_free(due);
    }
    nodes.resize(std::min<std::size_t>(nodes.size(), host_.free_blocks()));
}

Residency::Ahead Residency::look_ahead(std::uint32_t target, Unsaved unsaved) {
    Ahead found;
    const std::uint32_t free = device_.free_blocks();
    for (NodeId node = evictable_.ahead().next();
         node != kNone && free + evictable_.ahead().count() < target;
         node = evictable_.ahead().next()) {
        if (!is_saved(tree_[node])) {
            if (can_save(node)) {
                found.unsaved.push_back(node);
            } else if (unsaved == Unsaved::kDropped) {
                found.passed_open_step = true;
            } else {
                break;
            }
        }
        evictable_.ahead().add(node);
    }
    std::ranges::copy_if(evictable_.unsaved_parked(), std::back_inserter(found.unsaved),
                         [this](NodeId node) { return can_save(node); });
    return found;
}

void Residency::make_host_room(std::size_t blocks, std::uint32_t near_blocks) {
    // Blocks with kAhead or kParked are evicted soon, so they were saved for that; others were not.
    reclaim_host_copies(blocks, [&](NodeId node) {
        return host_copies_.size() <= config_.low_watermark_blocks ||
               (near_blocks > 0 && (tree_[node].has(kAhead) || evictable_.is_deferred(node)));
    });
    evict_host_until_free(blocks);
    if (host_.free_blocks() >= blocks || host_copies_.empty()) return;
    std::vector<NodeId> near;
    for (NodeId node = evictable_.device_front(); node != kNone && near.size() < near_blocks;
         node = evictable_.after_on_device(node)) {
        near.push_back(node);
    }
    std::sort(near.begin(), near.end());
    reclaim_host_copies(blocks, [&](NodeId node) {
        return (near_blocks > 0 && evictable_.is_deferred(node)) ||
               std::binary_search(near.begin(), near.end(), node);
    });
}

// Reclaims host copies until `blocks` host ids are free, except those for which stays(node) is
// true.
template <class Stays>
void Residency::reclaim_host_copies(std::size_t blocks, Stays stays) {
    BlockId host = host_copies_.first();
    while (host != kNoBlock && host_.free_blocks() < blocks) {
        const BlockId next = host_copies_.after(host);
        if (!stays(host_copies_.node_of(host))) reclaim_host_copy(host);
        host = next;
    }
}

void Residency::reclaim_host_copy(BlockId host) {
    const NodeId node = host_copies_.node_of(host);
    Node& n = tree_[node];
    host_copies_.remove(host);
    host_.give_back(host);
    n.host = kNoBlock;
    lose(node, kHostValid);
    if (n.has(kAhead)) evictable_.ahead().restart();
    ++reclaimed_host_copies_;
}

// Call before an attempt, so that an attempt without success evicts nothing.
bool Residency::could_make_host_room(std::size_t blocks) const {
    return std::size_t{host_.free_blocks()} + host_copies_.size() + evictable_.idle_host() >=
           blocks;
}

void Residency::evict_host_until_free(std::size_t blocks) {
    begin_eviction(EvictionCause::kCapacity);
    while (host_.free_blocks() < blocks &&
           evict_some_host(static_cast<std::uint32_t>(blocks - host_.free_blocks())) > 0) {
    }
    count_as(EvictionCause::kCapacity);
}

}  // namespace aiokv
