// Refs and holds of leases, and the device copies that they give to the index.
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

std::uint32_t Residency::ref(std::span<const NodeId> path) {
    std::uint32_t resident = 0;
    for (const NodeId node : path) {
        Node& n = tree_[node];
        resident += n.has(kDeviceResident);
        if (n.refs++ == 0) dequeue(node);
    }
    return resident;
}

void Residency::unref(std::span<const NodeId> path) {
    for (std::size_t i = path.size(); i-- > 0;) unref(path[i]);
}

void Residency::unref(NodeId node) {
    Node& n = tree_[node];
    if (--n.refs > 0) return;
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        enqueue(node);
    }
}

void Residency::hold(std::span<const NodeId> path) {
    for (const NodeId node : path) hold(node);
}

void Residency::hold(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == 0) {
        if (n.has(kQueued | kParked)) count_idle_host(n, -1);
        if (n.has(kHostValid)) host_copies_.remove(n.host);
    }
    if (n.holds == kMaxHolds) {
        ++more_holds_[node];
    } else {
        ++n.holds;
    }
}

void Residency::unhold(std::span<const NodeId> path) {
    for (const NodeId node : path) unhold(node);
}

void Residency::unhold(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == kMaxHolds) {
        if (const auto more = more_holds_.find(node); more != more_holds_.end()) {
            if (--more->second == 0) more_holds_.erase(more);
            return;
        }
    }
    --n.holds;
    if (n.holds == 0) {
        if (n.has(kQueued | kParked)) count_idle_host(n, +1);
        list_host_copy(node);
    }
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        requeue_if_free(node);
    }
}

// The deepest block is the least recently used: a child is always evicted before its parent.
void Residency::touch(std::span<const NodeId> path) {
    for (std::size_t i = path.size(); i-- > 0;) {
        if (!tree_[path[i]].has(kQueued | kParked)) continue;
        dequeue(path[i]);
        enqueue(path[i]);
    }
}

// The model sees a prompt once, when it is granted.
void Residency::classify(Lease& lease) {
    if (!reuse_) return;
    if (lease.classes.empty()) {
        const std::uint64_t epoch = reuse_->epoch();
        reuse_->observe(lease.tokens, index_.seed_of(lease), lease.classes);
        if (reuse_->epoch() != epoch) ahead_.restart();  // others may be in front now
        device_queue_.refresh();
        host_queue_.refresh();
    }
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        tree_[lease.path[i]].reuse_class = reuse_->class_at(lease.classes, i);
    }
}

bool Residency::publish(const Lease& lease, std::uint32_t block, PrefixTree::Found found) {
    Node& n = tree_[found.node];
    if (n.refs++ == 0 && !found.is_new) dequeue(found.node);
    if (reuse_) n.reuse_class = reuse_->class_at(lease.classes, block);
    if (n.has(kDeviceResident)) return false;
    n.device = lease.table[block];
    ++device_nodes_;
    n.set(kDeviceValid);
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
        unref(lease.path[i]);
    }
    lease.path.resize(first);
    return true;
}

void Residency::free_table(Lease& lease, Step step) {
    for (std::size_t i = lease.table.size(); i-- > 0;) {
        device_.use_in(lease.table[i], step);
        if (index_.is_private(lease, i)) device_.give_back(lease.table[i]);
        if (i < lease.path.size()) unref(lease.path[i]);
    }
    lease.table.clear();
}

void Residency::free_host(std::span<const BlockId> ids) {
    for (const BlockId id : ids) host_.give_back(id);
}

}  // namespace aiokv
