// Room for host copies: which of them make room for others, and which blocks are saved next.
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

void Residency::list_host_copy(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kDetached) && n.has(kHostValid) && n.has(kDeviceValid) && n.holds == 0) {
        host_copies_.add(n.host, node);
    }
}

// Evicting the node now would lose a block that the policy promised to keep.
bool Residency::must_save(NodeId node) const {
    if (config_.write_policy != WritePolicy::kWriteBack) return false;
    const Node& n = tree_[node];
    if (n.has(kHostValid | kBackupFailed)) return false;
    return host_.free_blocks() > 0 || !host_copies_.empty() || order_.queued_host() > 0;
}

std::vector<NodeId> Residency::look_ahead(std::uint32_t target) {
    std::vector<NodeId> dirty;
    const std::uint32_t free = device_.free_blocks();
    for (NodeId node = order_.ahead().next();
         node != kNone && free + order_.ahead().count() < target; node = order_.ahead().next()) {
        if (!is_saved(tree_[node])) dirty.push_back(node);
        order_.ahead().add(node);
    }
    return dirty;
}

void Residency::make_host_room(std::size_t blocks, std::uint32_t near_blocks) {
    // Nodes with kAhead are near the front, or were in the last walk; others are not.
    reclaim_host_copies(blocks,
                        [&](NodeId node) { return near_blocks > 0 && tree_[node].has(kAhead); });
    if (host_.free_blocks() < blocks && !host_copies_.empty()) {
        std::vector<NodeId> near;
        for (NodeId node = order_.device_front(); node != kNone && near.size() < near_blocks;
             node = order_.after_on_device(node)) {
            near.push_back(node);
        }
        std::sort(near.begin(), near.end());
        reclaim_host_copies(blocks, [&](NodeId node) {
            return std::binary_search(near.begin(), near.end(), node);
        });
    }
    evict_host_until_free(blocks);
}

// Newest first, until `blocks` host ids are free; not those of nodes that `stays` names.
template <class Stays>
void Residency::reclaim_host_copies(std::size_t blocks, Stays stays) {
    BlockId host = host_copies_.newest();
    while (host != kNoBlock && host_.free_blocks() < blocks) {
        const BlockId older = host_copies_.older(host);
        if (!stays(host_copies_.node_of(host))) reclaim_host_copy(host);
        host = older;
    }
}

void Residency::reclaim_host_copy(BlockId host) {
    const NodeId node = host_copies_.node_of(host);
    Node& n = tree_[node];
    host_copies_.remove(host);
    host_.give_back(host);
    n.host = kNoBlock;
    lose(node, kHostValid);
    if (n.has(kAhead)) order_.ahead().restart();
    ++reclaimed_host_copies_;
}

// Asked first, so that an attempt without success evicts nothing.
bool Residency::could_make_host_room(std::size_t blocks) const {
    return std::size_t{host_.free_blocks()} + host_copies_.size() + order_.idle_host() >= blocks;
}

void Residency::evict_host_until_free(std::size_t blocks) {
    while (host_.free_blocks() < blocks && evict_one_host()) {
    }
    count_as(EvictionCause::kCapacity);
}

}  // namespace aiokv
