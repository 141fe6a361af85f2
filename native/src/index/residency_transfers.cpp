// Copies of blocks between the tiers: pinned while they run, visible once proven (I3, I4).
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

Step Residency::after_step(std::span<const BlockId> device_blocks) const {
    Step newest = 0;
    for (const BlockId block : device_blocks) newest = std::max(newest, device_.after_step(block));
    return newest;
}

void Residency::begin_onload(const Transfer& transfer) {
    for (std::size_t i = 0; i < transfer.nodes.size(); ++i) {
        const NodeId node = transfer.nodes[i];
        Node& n = tree_[node];
        n.device = transfer.device_blocks[i];
        ++device_nodes_;
        n.set(kDeviceLoading);
        ++n.pins;
        tree_.count_device_child(node, +1);
    }
    index_.change();
}

void Residency::finish_onload(const Transfer& transfer, std::uint32_t good) {
    const std::vector<NodeId>& nodes = transfer.nodes;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        Node& n = tree_[nodes[i]];
        --n.pins;
        if (i >= good) continue;  // resident but not valid, until it is dropped below
        n.clear(kDeviceLoading);
        gain(nodes[i], kDeviceValid);
        list_host_copy(nodes[i]);
    }
    onloaded_ += good;
    failed_ += nodes.size() - good;
    if (good < nodes.size() && !tree_[nodes[good]].has(kDetached)) {
        begin_eviction(EvictionCause::kFailure);
        drop(nodes[good]);
        count_as(EvictionCause::kFailure);
    }
    for (std::size_t i = nodes.size(); i-- > 0;) {
        const Node& n = tree_[nodes[i]];
        if (i >= good && !tree_.is_live(nodes[i])) continue;  // dropped and freed
        if (n.has(kDetached)) {
            free_if_unowned(nodes[i]);
        } else if (tree_.refs(nodes[i]) == 0) {
            evictable_.enqueue_block(nodes[i]);
        }
    }
}

// Ends an onload that no lease waits for any more. Its blocks stay on the host.
void Residency::cancel_onload(const Transfer& transfer) {
    for (std::size_t i = transfer.nodes.size(); i-- > 0;) {
        const NodeId node = transfer.nodes[i];
        Node& n = tree_[node];
        --n.pins;
        if (n.has(kDetached)) {
            free_if_unowned(node);
            continue;
        }
        // A lease that computed the same block meanwhile may have refs, or even a child, on this
        // copy. Its path would have a gap without the block, so drop it: that lease publishes its
        // own copy.
        if (tree_.refs(node) > 0 || tree_.has_device_child(node)) {
            begin_eviction(EvictionCause::kFailure);
            drop(node);
            continue;
        }
        device_.give_back(n.device);
        n.device = kNoBlock;
        --device_nodes_;
        n.clear(kDeviceLoading);
        tree_.count_device_child(node, -1);
        evictable_.enqueue_block(node);
        evictable_.requeue_if_free(tree_.parent(node));
    }
    count_as(EvictionCause::kFailure);
}

void Residency::begin_offload(const Transfer& transfer) {
    for (std::size_t i = 0; i < transfer.nodes.size(); ++i) {
        Node& n = tree_[transfer.nodes[i]];
        n.host = transfer.host_blocks[i];
        n.set(kHostLoading);
        ++n.pins;
    }
}

void Residency::finish_offload(const Transfer& transfer, std::uint32_t good) {
    for (std::size_t i = 0; i < good; ++i) gain(transfer.nodes[i], kHostValid);
    for (std::size_t i = transfer.nodes.size(); i-- > 0;) {
        const NodeId node = transfer.nodes[i];
        Node& n = tree_[node];
        --n.pins;
        n.clear(kHostLoading);
        if (i < good) {
            list_host_copy(node);
        } else {
            n.set(kBackupFailed);
            host_.give_back(n.host);
            n.host = kNoBlock;
        }
        if (n.has(kDetached)) {
            free_if_unowned(node);
        } else {
            evictable_.requeue_if_free(node);
        }
    }
    offloaded_ += good;
    failed_ += transfer.nodes.size() - good;
}

}  // namespace aiokv
