#include "aiokv/evictable_blocks.hpp"

#include <algorithm>

#include "report.hpp"

namespace aiokv {

EvictableBlocks::EvictableBlocks(const CoreConfig& config, PrefixTree& tree)
    : tree_(tree),
      order_(make_eviction_order(config, tree)),
      device_(order_->device()),
      host_(order_->host()),
      ahead_(tree, device_) {}

std::size_t EvictableBlocks::bytes() const {
    return order_->bytes() + unsaved_parked_.capacity() * sizeof(NodeId);
}

TierQueue& EvictableBlocks::queue_of(NodeId node) {
    return tree_[node].has(kDeviceValid) ? device_ : host_;
}

void EvictableBlocks::enqueue(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kDeviceLoading)) return;  // its transfer enqueues it
    if (n.has(kDeviceValid)) {
        device_.push_back({&node, 1});
    } else {
        host_.push_back({&node, 1});
        count_idle_host(n, +1);
    }
    n.set(kQueued);
}

// Called with each change of kQueued | kParked or of holds.
void EvictableBlocks::count_idle_host(const Node& n, int change) {
    if (n.has(kDeviceValid) || n.holds > 0) return;
    idle_host_ += static_cast<std::uint32_t>(change);
}

void EvictableBlocks::dequeue(NodeId node) {
    Node& n = tree_[node];
    if (!n.has(kQueued | kParked)) return;
    if (!n.has(kDeviceValid)) {
        count_idle_host(n, -1);
        if (n.has(kQueued)) host_.remove({&node, 1});
    } else if (n.has(kParked)) {
        --deferred_device_;
    } else {
        ahead_.remove(node);
        device_.remove({&node, 1});
    }
    n.clear(kQueued | kParked | kAhead);
}

void EvictableBlocks::defer(NodeId node) {
    dequeue(node);
    Node& n = tree_[node];
    n.set(kParked);
    count_idle_host(n, +1);
    if (!n.has(kDeviceValid)) return;
    ++deferred_device_;
    if (is_saved(n) || n.has(kUnsavedParked)) return;
    n.set(kUnsavedParked);
    unsaved_parked_.push_back(node);
    if (unsaved_parked_.size() > most_unsaved_parked()) trim_unsaved_parked();
}

bool EvictableBlocks::is_parked_unsaved(NodeId node) const {
    const Node& n = tree_[node];
    return n.has(kParked) && n.has(kDeviceValid) && !is_saved(n);
}

void EvictableBlocks::trim_unsaved_parked() {
    // The flag goes with the first entry of a node; another one is that of a node freed since then.
    std::erase_if(unsaved_parked_, [this](NodeId node) {
        Node& n = tree_[node];
        if (!n.has(kUnsavedParked)) return true;
        n.clear(kUnsavedParked);
        return !is_parked_unsaved(node);
    });
    for (const NodeId node : unsaved_parked_) tree_[node].set(kUnsavedParked);
}

void EvictableBlocks::requeue_if_free(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kParked) || n.pins > 0) return;
    if (n.has(kDeviceValid) ? tree_.has_device_child(node) : n.child != kNone || n.holds > 0) {
        return;
    }
    dequeue(node);
    queue_of(node).push_front(node);
    tree_[node].set(kQueued);
    count_idle_host(n, +1);
    if (!n.has(kDeviceValid) || !ahead_.is_begun()) return;
    if (!is_saved(n)) return ahead_.restart();  // it is in front of them now
    ahead_.add_front(node);
}

bool EvictableBlocks::is_plainly_queued(NodeId node) const {
    const Node& n = tree_[node];
    return n.has(kQueued) && n.has(kDeviceValid) && !n.has(kDeviceLoading) && !ahead_.knows(node);
}

std::size_t EvictableBlocks::dequeue_run(std::span<const NodeId> path) {
    std::size_t length = 0;
    while (length < path.size() && is_plainly_queued(path[length])) {
        tree_[path[length++]].clear(kQueued);
    }
    if (length > 0) device_.remove(path.first(length));
    return length;
}

void EvictableBlocks::enqueue_run(std::span<const NodeId> path) {
    if (path.empty()) return;
    device_.push_back(path);
    for (const NodeId node : path) tree_[node].set(kQueued);
}

void EvictableBlocks::touch(std::span<const NodeId> path) {
    while (!path.empty()) {
        std::size_t length = 0;
        while (length < path.size() && is_plainly_queued(path[path.size() - 1 - length])) ++length;
        const std::span<const NodeId> run = path.last(length);
        if (length > 0) {
            device_.remove(run);
            device_.push_back(run);
        } else if (tree_[path.back()].has(kQueued | kParked)) {
            dequeue(path.back());
            enqueue(path.back());
        }
        path = path.first(path.size() - std::max<std::size_t>(length, 1));
    }
}

void EvictableBlocks::begin_hold(NodeId node) {
    const Node& n = tree_[node];
    if (n.has(kQueued | kParked)) count_idle_host(n, -1);
}

void EvictableBlocks::end_hold(NodeId node) {
    const Node& n = tree_[node];
    if (n.has(kQueued | kParked)) count_idle_host(n, +1);
}

void EvictableBlocks::check(Report& report) const {
    std::uint32_t queued_device = 0;
    std::uint32_t queued_host = 0;
    std::uint32_t deferred_device = 0;
    std::uint32_t idle_host = 0;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot)) continue;
        const bool listed = n.has(kQueued | kParked);
        idle_host += listed && !n.has(kDeviceValid) && n.holds == 0;
        queued_device += n.has(kQueued) && n.has(kDeviceValid);
        queued_host += n.has(kQueued) && !n.has(kDeviceValid);
        deferred_device += n.has(kParked) && n.has(kDeviceValid);
        const bool idle = n.refs == 0 && !n.has(kDeviceLoading | kDetached);
        report.require(idle == listed, "I6: node ", node, " with ", n.refs + 0, " refs is ",
                       listed ? "" : "not ", "evictable");
    }
    report.require(queued_device == device_.size() && queued_host == host_.size() &&
                       deferred_device == deferred_device_,
                   "I6: the eviction queues miscount");
    report.require(idle_host == idle_host_, "I6: ", idle_host, " host blocks can go, not ",
                   idle_host_);
}

}  // namespace aiokv
