// Refs and holds of leases, and the device copies that they give to the index.
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

std::uint32_t Residency::ref(std::span<const NodeId> path) {
    std::uint32_t resident = 0;
    std::size_t dequeued = 0;
    for (std::size_t i = 0; i < path.size(); ++i) {
        Node& n = tree_[path[i]];
        resident += n.has(kDeviceResident);
        if (n.refs++ > 0) continue;
        if (i >= dequeued) dequeued = i + evictable_.dequeue_run(path.subspan(i));
        if (i >= dequeued) evictable_.dequeue(path[i]);
        if (n.has(kHostValid)) host_copies_.move_to_first(n.host);
    }
    return resident;
}

void Residency::unref(std::span<const NodeId> path) {
    while (!path.empty()) {
        std::size_t length = 0;
        while (length < path.size() && only_enqueues(path[path.size() - 1 - length])) ++length;
        const std::span<const NodeId> run = path.last(length);
        for (const NodeId node : run) --tree_[node].refs;
        evictable_.enqueue_run(run);
        path = path.first(path.size() - length);
        if (path.empty()) return;
        unref_node(path.back());
        path = path.first(path.size() - 1);
    }
}

bool Residency::only_enqueues(NodeId node) const {
    const Node& n = tree_[node];
    return n.refs == 1 && !n.has(kDetached | kDeviceLoading) && n.has(kDeviceValid);
}

void Residency::unref_node(NodeId node) {
    Node& n = tree_[node];
    if (--n.refs > 0) return;
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        evictable_.enqueue(node);
    }
}

void Residency::hold(std::span<const NodeId> path) {
    for (const NodeId node : path) hold_node(node);
}

void Residency::hold_node(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == 0) {
        evictable_.begin_hold(node);
        if (n.has(kHostValid)) host_copies_.remove(n.host);
    }
    if (n.holds == kMaxHolds) {
        ++more_holds_[node];
    } else {
        ++n.holds;
    }
}

void Residency::unhold(std::span<const NodeId> path) {
    for (const NodeId node : path) unhold_node(node);
}

void Residency::unhold_node(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == kMaxHolds) {
        if (const auto more = more_holds_.find(node); more != more_holds_.end()) {
            if (--more->second == 0) more_holds_.erase(more);
            return;
        }
    }
    --n.holds;
    if (n.holds == 0) {
        evictable_.end_hold(node);
        list_host_copy(node);
    }
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        evictable_.requeue_if_free(node);
    }
}

bool Residency::publish(const Lease& lease, std::uint32_t block, PrefixTree::Found found) {
    Node& n = tree_[found.node];
    if (n.refs++ == 0 && !found.is_new) evictable_.dequeue(found.node);
    evictable_.on_computed(lease, block, found.node);
    if (n.has(kDeviceResident)) return false;
    n.device = lease.table[block];
    ++device_nodes_;
    gain(found.node, kDeviceValid);
    tree_.count_device_child(found.node, +1);
    if (n.has(kHostValid)) list_host_copy(found.node);
    return true;
}

bool Residency::reclaim_detached(Lease& lease) {
    const std::size_t first = index_.attached_blocks(lease);
    for (std::size_t i = first; i < lease.path.size(); ++i) {
        const Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i] && (node.refs > 1 || node.pins > 0)) return false;
    }
    for (std::size_t i = lease.path.size(); i-- > first;) {
        Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i]) {
            node.device = kNoBlock;
            --device_nodes_;
            node.clear(kDeviceResident);
        }
        unref_node(lease.path[i]);
    }
    lease.path.resize(first);
    return true;
}

void Residency::free_table(Lease& lease, Step step) {
    for (std::size_t i = lease.table.size(); i-- > 0;) {
        device_.use_in(lease.table[i], step);
        if (index_.is_private(lease, i)) device_.give_back(lease.table[i]);
        if (i < lease.path.size()) unref_node(lease.path[i]);
    }
    lease.table.clear();
    lease.received.clear();
}

void Residency::free_host(std::span<const BlockId> ids) {
    for (const BlockId id : ids) host_.give_back(id);
}

}  // namespace aiokv
