// Changes of a whole tier. They are rare, so they scan all nodes.
#include <algorithm>
#include <unordered_map>

#include "aiokv/error.hpp"
#include "aiokv/residency.hpp"
#include "core_detail.hpp"

namespace aiokv {

std::vector<NodeId> Residency::beyond_device(std::int64_t blocks) {
    const auto by_id = [this](NodeId a, NodeId b) { return tree_[a].device < tree_[b].device; };
    std::vector<NodeId> tops;
    for (NodeId node = evictable_.device_front(); node != kNone;
         node = evictable_.after_on_device(node)) {
        if (tree_[node].device >= blocks) tops.push_back(node);
    }
    const auto queued = static_cast<std::ptrdiff_t>(tops.size());
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot) || n.device < blocks) continue;
        if (!tree_.run(node).has(kQueued)) tops.push_back(node);
    }
    std::sort(tops.begin() + queued, tops.end(), by_id);

    std::vector<bool> seen(tree_.end_id(), false);
    std::vector<NodeId> found;
    for (const NodeId top : tops) {
        if (seen[top]) continue;
        const std::size_t first = found.size();
        found.push_back(top);
        for (std::size_t i = first; i < found.size(); ++i) {
            seen[found[i]] = true;
            const auto end = static_cast<std::ptrdiff_t>(found.size());
            tree_.for_each_child(found[i], [&](NodeId child) {
                if (tree_[child].has(kDeviceResident) && !seen[child]) found.push_back(child);
            });
            std::sort(found.begin() + end, found.end(), by_id);
        }
        std::reverse(found.begin() + static_cast<std::ptrdiff_t>(first), found.end());
    }
    return found;
}

void Residency::evict(std::span<const NodeId> nodes, EvictionCause cause) {
    begin_eviction(cause);
    for (const NodeId node : nodes) release_device_copy(node);
    count_as(cause);
}

void Residency::forget_host() {
    const auto is_on_host_alone = [this](NodeId node) {
        return tree_.is_live(node) && !tree_[node].has(kRoot | kDetached | kDeviceResident);
    };
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (!tree_.is_live(node) || !tree_[node].has(kHostValid)) continue;
        evicted_unsaved_ += stored_.awaits_save(node);
        stored_.clear(node, kSaveQueued);
    }
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        uncounted_.evicted_host += is_on_host_alone(node);
    }
    begin_eviction(EvictionCause::kSleep);
    tree_.evicted().set_from_host(true);
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (is_on_host_alone(node)) drop(node);  // including its subtree
    }
    count_as(EvictionCause::kSleep);
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        Node& n = tree_[node];
        if (!tree_.is_live(node) || !n.has(kHostValid)) continue;
        host_copies_.remove(n.host);
        host_.give_back(n.host);
        n.host = kNoBlock;
        lose(node, kHostValid);
    }
    evictable_.ahead().restart();
    index_.change();
}

// Returns the blocks that leases use, if nothing else needs a block: all other blocks are queued or
// deferred, and no other part has device or host ids. The groups besides attention know blocks by
// node, so there must be none.
std::optional<Residency::Leased> Residency::find_leased() const {
    const std::uint32_t queued = evictable_.evictable_device() + evictable_.idle_host();
    const std::uint32_t on_host = evictable_.idle_host() + host_copies_.size();
    if (held_nodes_ > 0 || device_.unfinished_step() > 0 || auxiliary_.exist() ||
        host_.free_blocks() + on_host != host_.capacity()) {
        return {};
    }
    Leased leased;
    index_.for_each_holder([&](const Lease& lease) {
        for (std::span path(lease.path); !path.empty();) {
            leased.runs.push_back(tree_.run_of(path.front()));
            path = path.subspan(tree_.runs()[leased.runs.back()].length);
        }
        for (std::size_t i = 0; i < lease.table.size(); ++i) {
            if (index_.is_private(lease, i)) leased.device_ids.push_back(lease.table[i]);
        }
    });
    std::ranges::sort(leased.runs);
    leased.runs.erase(std::ranges::unique(leased.runs).begin(), leased.runs.end());
    for (const RunId id : leased.runs) {
        const Run& run = tree_.runs()[id];
        for (NodeId node = run.first; node <= run.last(); ++node) {
            const Node& n = tree_[node];
            if (n.pins > 0 || !n.has(kDeviceValid)) return {};
            leased.device_ids.push_back(n.device);
        }
        leased.blocks += run.length;
    }
    if (queued + index_.num_contexts() + leased.blocks != tree_.live_nodes() ||
        device_.free_blocks() + evictable_.evictable_device() + leased.device_ids.size() !=
            device_.capacity()) {
        return {};
    }
    return leased;
}

// Does the same as detach() for all blocks, at a cost that depends only on the number of those that
// leases use.
void Residency::drop_all_but(const Leased& leased) {
    uncounted_.dropped += evictable_.evictable_device() + evictable_.idle_host();
    for (const RunId id : leased.runs) {
        const Run& run = tree_.runs()[id];
        for (NodeId node = run.first; node <= run.last(); ++node) {
            Node& n = tree_[node];
            uncounted_.dropped += !n.has(kDetached);
            n.set(kDetached);
            n.clear(kHostValid | kBackupQueued | kUnsavedParked | kHasItems);
            n.host = kNoBlock;
        }
    }
    evictable_.clear();
    host_copies_.clear();
    device_.free_all_but(leased.device_ids);
    host_.free_all();
    device_nodes_ = leased.blocks;
    index_.clear_all_but(leased.runs);
    count_as(EvictionCause::kReset);
}

// Does the same as detach() for all blocks of a run, if nothing uses one of them: then all of them
// are freed. Returns false, changing nothing, if something does. `keeps_slots`: as for
// PrefixTree::free_run().
bool Residency::drop_unused(RunId id, bool keeps_slots) {
    const Run run = tree_.runs()[id];
    if (run.refs > 0) return false;
    const std::span<const Node> nodes(&tree_[run.first], run.length);
    std::uint32_t used = 0;
    std::uint32_t more = 0;  // above 0: one has more than a device copy
    for (const Node& n : nodes) {
        used |= n.pins | n.holds;
        more |= static_cast<std::uint32_t>(n.host ^ kNoBlock) | (n.flags & kHasSides);
    }
    if (used != 0) return false;
    evictable_.dequeue(id);
    for (NodeId node = run.first; more != 0 && node <= run.last(); ++node) {
        const Node& n = tree_[node];
        if (n.has(kHasSides)) auxiliary_.forget(node);
        if (n.host == kNoBlock) continue;
        host_copies_.remove(n.host);
        host_.give_back(n.host);
    }
    if (run.has(kOnDevice)) {
        device_.give_back_all(run.length, [nodes](std::uint32_t i) { return nodes[i].device; });
        device_nodes_ -= run.length;
    } else {
        for (const Node& n : nodes) {
            if (n.device == kNoBlock) continue;
            device_.give_back(n.device);
            --device_nodes_;
        }
    }
    uncounted_.dropped += run.length;
    tree_.free_run(id, keeps_slots);
    return true;
}

void Residency::detach_all(bool new_weights) {
    events_.clear();
    if (new_weights && tree_.evicted().limit() > 0) return retire_all();
    if (const auto leased = find_leased()) return drop_all_but(*leased);
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (!tree_.is_live(node) || tree_[node].has(kDetached)) continue;
        if (tree_[node].has(kRoot)) {
            tree_.forget_children(node);
            continue;
        }
        // The first block of its run: those below a detached block are detached.
        const RunId id = tree_.run_of(node);
        const NodeId last = tree_.runs()[id].last();
        if (!drop_unused(id)) {
            for (NodeId used = node; used <= last; ++used) detach(used);
        }
        node = last;
    }
    tree_.forget_history();
    count_as(EvictionCause::kReset);
}

// Detaches all blocks, and moves them to the history. Blocks in use keep their slots, so the
// history gets copies of their token ids.
void Residency::retire_all() {
    begin_eviction(EvictionCause::kReset);
    struct Known {
        RunId run;  // kNoRun: left the tree
        NodeId first;
        std::uint32_t length;
        NodeId parent;  // in the history
    };
    std::vector<Known> known;  // parents come before their children
    std::vector<NodeId> used;
    std::unordered_map<NodeId, NodeId> copies;  // of used blocks
    const auto add_children = [&](NodeId parent) {
        for (const NodeId child : scratch_) {
            const RunId run = tree_.run_of(child);
            known.push_back({run, child, tree_.runs()[run].length, parent});
        }
    };
    const auto find_children = [&](NodeId node) {
        scratch_.clear();
        tree_.for_each_child(node, [&](NodeId child) { scratch_.push_back(child); });
    };
    index_.for_some_roots(~std::size_t{0}, [&](NodeId root) {
        find_children(root);
        add_children(root);
        tree_.forget_children(root);
    });
    for (std::size_t i = 0; i < known.size(); ++i) {
        const Known top = known[i];
        if (top.run == kNoRun) continue;
        const NodeId end = top.first + top.length;
        find_children(end - 1);
        if (drop_unused(top.run, true)) {
            add_children(end - 1);
            continue;
        }
        known[i].length = 0;
        NodeId parent = top.parent;
        for (NodeId node = top.first; node < end;) {
            const auto copy = tree_.copy_slots(node, end - node);
            const auto first = static_cast<NodeId>(copy.first);
            known.push_back({kNoRun, first, copy.count, parent});
            for (parent = first; parent < first + copy.count; ++parent) {
                used.push_back(node);
                copies[node++] = parent;
            }
            --parent;
        }
        add_children(parent);
    }
    tree_.evicted().change_reasons(copies);
    for (const NodeId node : used) detach(node);
    for (std::size_t i = known.size(); i-- > 0;) {
        if (known[i].length > 0) tree_.retire(known[i].first, known[i].length, known[i].parent);
    }
    count_as(EvictionCause::kReset);
}

void Residency::drop_context(NodeId root) {
    std::vector<NodeId> tops;
    tree_.for_each_child(root, [&](NodeId top) { tops.push_back(top); });
    for (const NodeId top : tops) drop(top);
    tree_.forget_history();  // no token id of a purged salt stays in it
    count_as(EvictionCause::kReset);
}

void Residency::resize_device(std::uint32_t blocks) {
    const std::vector<NodeId> leaving = beyond_device(blocks);
    std::vector<bool> leaves(device_.capacity(), false);
    for (const NodeId node : leaving) {
        const Node& n = tree_[node];
        // A dropped block without refs and pins exists until the save of its host copy has ended.
        if (tree_.refs(node) > 0 || n.pins > 0 || n.has(kDetached)) {
            throw resize_refused(device_.capacity(), blocks, n.device, "leased or being copied");
        }
        if (device_.after_step(n.device) != 0) {
            throw resize_refused(device_.capacity(), blocks, n.device,
                                 "used by an unfinished step");
        }
        leaves[static_cast<std::size_t>(n.device)] = true;
    }
    // After the release of a swapped lease, its transfer owns blocks that neither a lease nor the
    // index has.
    for (std::uint32_t id = blocks; id < device_.capacity(); ++id) {
        const auto block = static_cast<BlockId>(id);
        if (!leaves[id] && !device_.is_free(block)) {
            throw resize_refused(device_.capacity(), blocks, block, "being copied");
        }
    }
    evict(leaving, EvictionCause::kResize);
    device_.resize(blocks);
    evictable_.on_device_resized(blocks);
}

}  // namespace aiokv
