// What happens to a whole tier: it is forgotten, or gets another size; and reset.
//
// Rare, so these scan all nodes.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

void Core::require_rest(const char* tier, bool swapped_too) const {
    const auto in_use = std::find_if(leases_.begin(), leases_.end(), [&](const Lease& lease) {
        return lease.live && (lease.granted || (swapped_too && lease.swapped));
    });
    if (in_use == leases_.end() && transfers_.empty() && moves_.empty()) return;
    throw UsageError("cannot forget the " + std::string(tier) +
                     " tier: " + std::to_string(transfers_.size() + moves_.size()) +
                     " transfers are in flight, " +
                     (in_use == leases_.end() ? "no lease" : "a lease") + " holds blocks");
}

// The device tier is empty; what has a host copy stays on the host. Throws UsageError, changing
// nothing, while a lease or a transfer needs blocks.
void Core::forget_device() {
    require_rest("device", has_sides());  // a swapped lease has its state and windows there
    if (state_) state_->forget_all();
    for (WindowGroup& group : windows_) group.pool.forget_all();
    for (const NodeId node : beyond_device(0)) release_device_copy(node);
}

// The host tier is empty; what is on the device stays there. Throws UsageError, changing nothing,
// while a lease, a swapped one too, or a transfer needs blocks.
void Core::forget_host() {
    require_rest("host", true);
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot | kDetached | kDeviceResident)) continue;
        ++counters_.evicted_host_blocks;
        drop(node);
    }
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        Node& n = tree_[node];
        if (!tree_.is_live(node) || !n.has(kHostValid)) continue;
        twins_.remove(n.host);
        host_.give_back(n.host);
        n.host = kNoBlock;
        n.clear(kHostValid);
    }
    forget_ahead();
    ++version_;
}

// Everything becomes unmatchable. Leases keep their blocks; what they commit is not indexed.
void Core::reset() {
    ++epoch_;
    ++version_;
    backups_.clear();
    promises_.clear();  // what those leases compute will not be published
    for (Lease& lease : leases_) lease.frontier = kNone;
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        if (!tree_.is_live(node) || tree_[node].has(kDetached)) continue;
        if (tree_[node].has(kRoot)) {
            tree_.forget_children(node);
        } else {
            detach(node);
        }
    }
    for (std::uint32_t i = 1; i < contexts_.size(); ++i) {
        if (contexts_[i].root != kNone) close_context_if_unused(i);
    }
    for (Lease& lease : leases_) {
        if (lease.live && lease.swapped) trim_swapped(lease);
    }
}

// What has a device id that is not below `blocks`, and all on the device below that, children
// before parents; otherwise in order of eviction, what is not queued after that, by id.
std::vector<NodeId> Core::beyond_device(std::int64_t blocks) {
    const auto by_id = [this](NodeId a, NodeId b) { return tree_[a].device < tree_[b].device; };
    std::vector<NodeId> tops;
    for (NodeId node = device_queue_.front(); node != kNone; node = device_queue_.after(node)) {
        if (tree_[node].device >= blocks) tops.push_back(node);
    }
    const auto queued = static_cast<std::ptrdiff_t>(tops.size());
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot) || n.device < blocks) continue;
        if (!n.has(kQueued)) tops.push_back(node);
    }
    std::sort(tops.begin() + queued, tops.end(), by_id);

    std::vector<bool> seen(tree_.slots(), false);
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

// Blocks beyond the new size, and those below them, leave the device: they stay on the host, or are
// dropped where they have no copy there. Throws UsageError, changing nothing, when one of them is
// leased or moving.
void Core::resize_device(std::int64_t blocks) {
    if (blocks <= static_cast<std::int64_t>(config_.reserve_blocks) || blocks > (1 << 30)) {
        throw UsageError("cannot resize the device pool to " + std::to_string(blocks) +
                         " blocks; reserve_blocks is " + std::to_string(config_.reserve_blocks));
    }
    const auto beyond = [&](BlockId id) { return id >= blocks; };
    const auto refuse = [&](BlockId id, const char* why) {
        throw UsageError("cannot resize the device pool from " +
                         std::to_string(device_.capacity()) + " to " + std::to_string(blocks) +
                         " blocks: block " + std::to_string(id) + " is " + why);
    };
    if (device_.cooling_blocks() > 0 && blocks < device_.capacity()) {
        throw UsageError("cannot shrink the device pool while " +
                         std::to_string(device_.cooling_blocks()) +
                         " freed blocks wait for their step");
    }
    // A pending resize is tried again at each release. So scan the nodes again only when a
    // transfer or a step has ended, and the leases from the one on that was in the way last.
    const ResizeTry attempt{blocks, ended_transfers_, device_.finished_step()};
    if (attempt == refused_resize_) {
        throw UsageError("cannot resize the device pool to " + std::to_string(blocks) +
                         " blocks: the transfers or steps of the last try are not over");
    }
    for (std::size_t i = 0; i < leases_.size(); ++i) {
        const std::size_t slot = (resize_slot_ + i) % leases_.size();
        const std::vector<BlockId>& table = leases_[slot].table;
        const auto held = std::find_if(table.begin(), table.end(), beyond);
        if (held == table.end()) continue;
        resize_slot_ = slot;
        refuse(*held, "leased");
    }
    refused_resize_ = attempt;
    const std::vector<NodeId> leaving = beyond_device(blocks);
    std::vector<bool> leaves(device_.capacity(), false);
    for (const NodeId node : leaving) {
        const Node& n = tree_[node];
        if (n.refs > 0 || n.pins > 0) refuse(n.device, "leased or being copied");
        if (device_.after_step(n.device) != 0) refuse(n.device, "used by an unfinished step");
        leaves[static_cast<std::size_t>(n.device)] = true;
    }
    // A swap owns blocks that neither a lease nor the index has, once the lease was released.
    for (std::int64_t id = blocks; id < device_.capacity(); ++id) {
        const auto block = static_cast<BlockId>(id);
        if (!leaves[static_cast<std::size_t>(id)] && !device_.is_free(block)) {
            refuse(block, "being copied");
        }
    }
    for (const NodeId node : leaving) release_device_copy(node);
    device_.resize(static_cast<std::uint32_t>(blocks));
    if (device_duel_) device_duel_->resize(static_cast<std::uint32_t>(blocks));
    refused_resize_ = {};
}

}  // namespace aiokv
