// Eviction and dropping.
//
// A queue holds the nodes without refs, the next victim first. A node that comes up while a
// transfer pins it, or while a child still needs it, is parked; it returns to the front when the
// obstacle is gone, because everything left in the queue is to be kept longer.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

EvictionQueue<PrefixTree>& Core::queue_of(NodeId node) {
    return tree_[node].has(kDeviceValid) ? device_queue_ : host_queue_;
}

void Core::enqueue(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kDeviceLoading)) return;  // its transfer enqueues it
    if (n.has(kDeviceValid)) {
        device_queue_.push_back(node);
    } else {
        host_queue_.push_back(node);
        count_idle_host(n, +1);
    }
    n.set(kQueued);
}

// Called with each change of kQueued | kParked or of holds.
void Core::count_idle_host(const Node& n, int change) {
    if (n.has(kDeviceValid) || n.holds > 0) return;
    idle_host_ += static_cast<std::uint32_t>(change);
}

void Core::dequeue(NodeId node) {
    Node& n = tree_[node];
    if (!n.has(kQueued | kParked)) return;
    if (!n.has(kDeviceValid)) {
        count_idle_host(n, -1);
        if (n.has(kQueued)) host_queue_.remove(node);
    } else if (n.has(kParked)) {
        --parked_device_;
    } else {
        if (n.has(kAhead) || node == ahead_last_) leave_ahead(node);
        device_queue_.remove(node);
    }
    n.clear(kQueued | kParked | kAhead);
}

void Core::park(NodeId node) {
    dequeue(node);
    Node& n = tree_[node];
    n.set(kParked);
    count_idle_host(n, +1);
    parked_device_ += n.has(kDeviceValid);
}

void Core::unpark_if_free(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kParked) || n.pins > 0) return;
    if (n.has(kDeviceValid) ? tree_.has_device_child(node) : n.child != kNone || n.holds > 0) {
        return;
    }
    dequeue(node);
    queue_of(node).push_front(node);
    tree_[node].set(kQueued);
    count_idle_host(n, +1);
    if (!n.has(kDeviceValid) || ahead_last_ == kNone) return;
    if (!can_go(n)) return forget_ahead();  // it is in front of them now
    tree_[node].set(kAhead);
    ++clean_ahead_;
}

void Core::unref(NodeId node) {
    Node& n = tree_[node];
    if (--n.refs > 0) return;
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        enqueue(node);
    }
}

// Of a detached node: its leases use the device copy alone, and no swapped one can come back to it.
void Core::free_if_unowned(NodeId node) {
    Node& n = tree_[node];
    if (n.pins > 0) return;
    if (n.host != kNoBlock) {
        twins_.remove(n.host);
        host_.give_back(n.host);
    }
    n.host = kNoBlock;
    n.clear(kHostValid);
    if (n.refs > 0) return;
    if (n.device != kNoBlock) {
        device_.give_back(n.device);
        --device_nodes_;
    }
    n.device = kNoBlock;
    if (n.holds == 0) tree_.free(node);
}

// Unmatchable from now on; what no lease and no transfer owns is freed at once.
void Core::detach(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kQueued | kParked)) dequeue(node);
    n.parent = kNone;
    n.set(kDetached);
    n.clear(kBackupQueued);
    if (n.has(kHostValid)) twins_.remove(n.host);
    if (n.has(kHasSides)) {
        if (state_) state_->forget(node);
        for (WindowGroup& group : windows_) group.pool.forget(node);
    }
    tree_.forget_children(node);
    ++counters_.dropped_blocks;
    free_if_unowned(node);
}

void Core::drop_subtree(NodeId top) {
    scratch_.assign(1, top);
    while (!scratch_.empty()) {
        const NodeId node = scratch_.back();
        scratch_.pop_back();
        tree_.for_each_child(node, [&](NodeId child) { scratch_.push_back(child); });
        detach(node);
    }
}

// Drop a node and all below it.
void Core::drop(NodeId node) {
    const NodeId parent = tree_[node].parent;
    tree_.unlink(node);
    if (tree_[node].child == kNone) {
        detach(node);
    } else {
        drop_subtree(node);
    }
    ++version_;
    if (tree_[parent].has(kRoot)) {
        close_context_if_unused(static_cast<std::uint32_t>(tree_[parent].device));
    } else {
        unpark_if_free(parent);
    }
}

void Core::release_device_copy(NodeId node) {
    Node& n = tree_[node];
    dequeue(node);
    device_.give_back(n.device);
    n.device = kNoBlock;
    --device_nodes_;
    n.clear(kDeviceValid);
    tree_.count_device_child(node, -1);
    ++counters_.evicted_device_blocks;
    if (!n.has(kHostValid)) return drop(node);
    twins_.remove(n.host);
    ++version_;
    enqueue(node);
    unpark_if_free(n.parent);
}

bool Core::evict_one_device() {
    for (NodeId node; (node = device_queue_.front()) != kNone;) {
        const Node& n = tree_[node];
        if (n.pins == 0 && !tree_.has_device_child(node)) {
            if (must_save(node)) {
                stopped_at_unsaved_ = true;
                return false;
            }
            release_device_copy(node);
            return true;
        }
        // It can go when its save has ended. Parking it now would park its unsaved ancestors too,
        // out of sight of take_write_backs(): they would be saved one by one.
        if (n.has(kHostLoading) && config_.write_policy == WritePolicy::kWriteBack) return false;
        park(node);
    }
    return false;
}

bool Core::evict_one_host() {
    for (NodeId node; (node = host_queue_.front()) != kNone;) {
        const Node& n = tree_[node];
        if (n.pins == 0 && n.holds == 0 && n.child == kNone) {
            ++counters_.evicted_host_blocks;
            drop(node);
            return true;
        }
        park(node);
    }
    return false;
}

bool Core::make_room(std::uint32_t blocks) {
    stopped_at_unsaved_ = false;
    while (device_.free_blocks() < blocks) {
        if (!evict_one_device()) return false;
    }
    return true;
}

// Stops before blocks that the write policy wants saved first; see take_write_backs().
std::uint32_t Core::evict_device(std::uint32_t blocks) {
    std::uint32_t evicted = 0;
    while (evicted < blocks && evict_one_device()) ++evicted;
    return evicted;
}

std::uint32_t Core::evict_host(std::uint32_t blocks) {
    std::uint32_t evicted = 0;
    while (evicted < blocks && evict_one_host()) ++evicted;
    return evicted;
}

}  // namespace aiokv
