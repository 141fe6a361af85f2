// Refs and holds of leases, and the device copies that they give to the index.
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

std::uint32_t Residency::ref(std::span<const NodeId> path) {
    std::uint32_t resident = 0;
    evictable_.begin_use(path);
    tree_.for_each_run(path, [&](RunId id, std::span<const NodeId> nodes) {
        Run& run = tree_.runs()[id];
        const bool is_first = run.refs++ == 0;
        if (is_first) evictable_.use(id);
        resident += tree_.count_on_device(run, nodes, kDeviceResident);
        if (!is_first || config_.host_blocks == 0) return;
        for (const NodeId node : nodes) {
            if (tree_[node].has(kHostValid)) host_copies_.move_to_first(tree_[node].host);
        }
    });
    return resident;
}

void Residency::unref(std::span<const NodeId> path) {
    tree_.for_each_run_upwards(path, [&](RunId id, auto) { unref_run(id); });
}

void Residency::unref_run(RunId id) {
    Run& run = tree_.runs()[id];
    if (--run.refs > 0) return;
    const NodeId first = run.first;
    if (!tree_[first].has(kDetached)) return evictable_.enqueue(id);
    for (NodeId node = run.last() + 1; node-- > first;) free_if_unowned(node);
}

// Returns the end of a path whose blocks have no other children and are in no use.
std::span<const NodeId> Residency::unshared(std::span<const NodeId> path) const {
    std::size_t first = path.size();
    for (; first > 0; --first) {
        const NodeId node = path[first - 1];
        const Node& n = tree_[node];
        const bool is_used = tree_.refs(node) > 0 || n.pins > 0 || n.holds > 0;
        if (is_used || tree_.children(node) > (first < path.size() ? 1 : 0)) break;
    }
    return path.subspan(first);
}

std::uint32_t Residency::demote(std::span<const NodeId> path) {
    const auto last = unshared(path);
    evictable_.demote(last);
    return static_cast<std::uint32_t>(last.size());
}

void Residency::evict_first(std::span<const NodeId> path) {
    std::size_t first = path.size();
    std::size_t end = path.size();
    const auto demote = [&] {
        evictable_.demote(path.subspan(first, end - first));
        end = first;
    };
    for (; first > 0; --first) {
        const NodeId node = path[first - 1];
        if (!may_evict_first(node)) break;
        const bool is_last = first == path.size();
        if (tree_.children(node) > (is_last ? 0 : 1)) {
            std::size_t most = 1;
            while (most < first && tree_.children(path[first - 1 - most]) == 1) ++most;
            if (!list_below(node, is_last ? kNone : path[first], most)) break;
            demote();
            for (; !scratch_.empty(); scratch_.pop_back()) {
                const RunId run = tree_.run_of(scratch_.back());
                if (tree_.runs()[run].last() == scratch_.back()) evictable_.demote(run);
            }
        }
    }
    demote();
}

// Returns true if no lease uses the block and no application retains it.
bool Residency::may_evict_first(NodeId node) const {
    return tree_.refs(node) == 0 && tree_.run(node).level <= kDemotedLevel;
}

// Lists the blocks below a node in scratch_, parents first, without those below one child. Returns
// false if they are more than `most`, or if one of them may not be evicted first.
bool Residency::list_below(NodeId top, NodeId except, std::size_t most) {
    scratch_.clear();
    const auto list = [&](NodeId node) {
        if (scratch_.size() + tree_.children(node) > most + 1) return false;
        tree_.for_each_child(node, [&](NodeId child) {
            if (child != except) scratch_.push_back(child);
        });
        return true;
    };
    if (!list(top)) return false;
    for (std::size_t i = 0; i < scratch_.size(); ++i) {
        if (!may_evict_first(scratch_[i]) || !list(scratch_[i])) return false;
    }
    return scratch_.size() <= most;
}

std::uint32_t Residency::forget(std::span<const NodeId> path) {
    const auto last = unshared(path);
    begin_eviction(EvictionCause::kRequest);
    for (std::size_t i = last.size(); i-- > 0;) {
        evicted_unsaved_ += stored_.awaits_save(last[i]);
        drop(last[i]);
    }
    count_as(EvictionCause::kRequest);
    return static_cast<std::uint32_t>(last.size());
}

std::map<std::string, std::uint32_t> Residency::retained_blocks() {
    std::map<std::string, std::uint32_t> blocks;
    evictable_.for_each_retained([&](RunId id) {
        NodeId root = tree_.runs()[id].first;
        while (!tree_[root].has(kRoot)) root = tree_.run(root).parent;
        blocks[std::string(index_.context_of_root(root))] += tree_.runs()[id].length;
    });
    return blocks;
}

void Residency::hold(std::span<const NodeId> path) {
    for (const NodeId node : path) hold_node(node);
}

void Residency::hold_node(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == 0) {
        ++held_nodes_;
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
        --held_nodes_;
        evictable_.end_hold(node);
        list_host_copy(node);
    }
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        evictable_.requeue_if_free(node);
    }
}

bool Residency::reclaim_detached(Lease& lease) {
    const std::size_t first = index_.attached_blocks(lease);
    for (std::size_t i = first; i < lease.path.size(); ++i) {
        const Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i] && (tree_.refs(lease.path[i]) > 1 || node.pins > 0))
            return false;
    }
    for (std::size_t i = lease.path.size(); i-- > first;) {
        Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i]) {
            node.device = kNoBlock;
            --device_nodes_;
            node.clear(kDeviceResident);
            tree_.run(lease.path[i]).clear(kOnDevice);
        }
        unref_run(tree_.isolate(lease.path[i]));
    }
    lease.path.resize(first);
    return true;
}

void Residency::free_table(Lease& lease, Step step) {
    device_.use_in(lease.table, step);
    for (std::size_t i = lease.table.size(); i-- > lease.path.size();) {
        device_.give_back(lease.table[i]);
    }
    tree_.for_each_run_upwards(lease.path, [&](RunId id, std::span<const NodeId> nodes) {
        const BlockId* table = lease.table.data() + (nodes.data() - lease.path.data());
        const Node* run = &tree_[nodes.front()];
        BlockId differs = 0;
        for (std::size_t i = 0; i < nodes.size(); ++i) differs |= run[i].device ^ table[i];
        for (std::size_t i = differs == 0 ? 0 : nodes.size(); i-- > 0;) {
            if (run[i].device != table[i]) device_.give_back(table[i]);
        }
        unref_run(id);
    });
    lease.table.clear();
    lease.received.clear();
}

void Residency::free_host(std::span<const BlockId> ids) {
    for (const BlockId id : ids) host_.give_back(id);
}

}  // namespace aiokv
