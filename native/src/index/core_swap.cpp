// Preemption with the whole table moved to host memory, and forks.
//
//   table   | path: indexed blocks, by node | tail: computed, not indexed | not computed |
//   swapped | a hold on each host copy      | tail_host                   | nothing      |
//
// A hold keeps a host copy; the device copies may be evicted. Resuming is an allocate whose path
// is known already.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

void Core::take_host_back(std::span<const BlockId> ids) {
    for (const BlockId id : ids) host_.give_back(id);
}

void Core::hold(NodeId node) {
    Node& n = tree_[node];
    if (n.holds == 0) {
        if (n.has(kQueued | kParked)) count_idle_host(n, -1);
        if (n.has(kHostValid)) twins_.remove(n.host);
    }
    if (n.holds == kMaxHolds) {
        ++more_holds_[node];
    } else {
        ++n.holds;
    }
}

void Core::unhold(NodeId node) {
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
        note_twin(node);
    }
    if (n.has(kDetached)) {
        free_if_unowned(node);
    } else {
        unpark_if_free(node);
    }
}

// A backup of the lease's blocks that is under way. If it fails, a swap that counted on it would
// have lost a part of the table: let it end first.
TransferId Core::saving(LeaseId id) const {
    const Lease& lease = this->lease(id);
    const auto is_saved = [this](NodeId node) { return tree_[node].has(kHostLoading); };
    if (lease.swap_out != 0) return 0;
    const auto node = std::find_if(lease.path.begin(), lease.path.end(), is_saved);
    if (node == lease.path.end()) return 0;
    for (const auto& [transfer_id, transfer] : transfers_) {
        if (transfer.direction != Direction::kOffload) continue;
        const std::vector<NodeId>& nodes = transfer.nodes;
        if (std::find(nodes.begin(), nodes.end(), *node) != nodes.end()) return transfer_id;
    }
    return 0;
}

// Whether make_host_room would succeed; so that an attempt in vain evicts nothing.
bool Core::could_make_host_room(std::size_t blocks) const {
    return std::size_t{host_.free_blocks()} + twins_.size() + idle_host_ >= blocks;
}

// Begins to move the table; swap_out of the lease is 0 when nothing had to be copied. Returns
// false, changing nothing, when the host has no room or the cache was reset under the lease.
bool Core::swap_out(LeaseId id, Step step) {
    Lease& lease = lease_at(id);
    if (!lease.granted || lease.failed || !lease.onloads.empty() || lease.swap_out != 0) {
        throw LeaseError("only a granted lease whose transfers have ended can be swapped");
    }
    if (lease.batches > 0)
        throw LeaseError("preempt: a batch computes with the lease; let it end before the swap");
    if (lease.epoch != epoch_ || (!lease.path.empty() && tree_[lease.path.back()].has(kDetached))) {
        return false;
    }
    const std::size_t first = lease.path.size();
    const std::size_t computed = blocks_for(lease.computed_tokens);
    const std::span<const BlockId> tail =
        std::span(lease.table).subspan(first, std::max(computed, first) - first);
    std::vector<NodeId> unsaved;
    for (const NodeId node : lease.path) {
        hold(node);
        if (!tree_[node].has(kHostValid | kHostLoading)) unsaved.push_back(node);
    }
    const std::size_t needed = unsaved.size() + tail.size();
    if (could_make_host_room(needed)) make_host_room(needed, 0);
    if (host_.free_blocks() < needed) {
        for (const NodeId node : lease.path) unhold(node);
        return false;
    }
    withdraw(lease);
    if (needed > 0) {
        lease.tail_host.resize(tail.size());
        host_.take(lease.tail_host);
        lease.swap_out = start_offload(std::move(unsaved), tail, lease.tail_host);
        transfers_.at(lease.swap_out).tail_owner = id;
    }
    // The copy waits for the steps that computed the blocks; who gets their ids, for all of them.
    const Step last = last_use(lease, step);
    for (const BlockId block : lease.table) device_.use_in(block, last);
    use_sides(lease, last);
    if (needed == 0) finish_swap_out(lease, true);
    return true;
}

// All or nothing: either the device side is given up, or the host side.
void Core::finish_swap_out(Lease& lease, bool moved) {
    lease.swap_out = 0;
    if (!moved) {
        take_host_back(lease.tail_host);
        lease.tail_host.clear();
        for (const NodeId node : lease.path) unhold(node);
        announce(lease);
        return;
    }
    free_table(lease, 0);
    set_granted(lease, false);
    lease.swapped = true;
    ++swapped_leases_;
    lease.num_tokens = 0;
    trim_swapped(lease);
}

void Core::drop_swapped(Lease& lease) {
    for (std::size_t i = lease.path.size(); i-- > 0;) unhold(lease.path[i]);
    take_host_back(lease.tail_host);
    lease.tail_host.clear();
    lease.swapped = false;
    --swapped_leases_;
}

// Behind the first block that is lost everything has to be computed again; after a reset, all.
void Core::trim_swapped(Lease& lease) {
    std::size_t intact = 0;
    for (; lease.epoch == epoch_ && intact < lease.path.size(); ++intact) {
        const Node& n = tree_[lease.path[intact]];
        if (n.has(kDetached) || !n.has(kDeviceResident | kHostValid)) break;
    }
    if (lease.epoch == epoch_ && intact == lease.path.size() && has_own_sides(lease)) return;
    intact = reachable(lease, intact);
    lease.state_valid = false;
    give_windows_back(lease, 0);
    for (std::size_t i = lease.path.size(); i-- > intact;) unhold(lease.path[i]);
    lease.path.resize(intact);
    take_host_back(lease.tail_host);
    lease.tail_host.clear();
    lease.computed_tokens = static_cast<std::uint32_t>(intact) * config_.block_tokens;
}

// Blocks behind the path that a resumed lease gets back by a transfer under way.
std::size_t Core::tail_under_way(LeaseId id) const {
    for (const TransferId transfer_id : lease(id).onloads) {
        const auto found = transfers_.find(transfer_id);
        if (found == transfers_.end() || found->second.tail_owner != id) continue;
        return found->second.device_blocks.size() - found->second.nodes.size();
    }
    return 0;
}

// The lease goes while its tail is being copied: the ids are the transfer's from now on (I3).
void Core::orphan_tail(Transfer& transfer, Step step) {
    Lease& lease = lease_at(transfer.tail_owner);
    const std::size_t blocks = transfer.device_blocks.size() - transfer.nodes.size();
    for (std::size_t i = 0; i < blocks; ++i) {
        device_.use_in(transfer.device_blocks[transfer.nodes.size() + i], step);
    }
    const auto begin = lease.table.begin() + static_cast<std::ptrdiff_t>(lease.path.size());
    lease.table.erase(begin, begin + static_cast<std::ptrdiff_t>(blocks));
    transfer.orphaned = true;
    if (lease.swap_out == 0) return;
    for (const NodeId node : lease.path) unhold(node);
    lease.tail_host.clear();
    lease.swap_out = 0;
}

// `good_blocks` of the whole transfer are proven.
void Core::finish_tail(Transfer& transfer, std::uint32_t good_blocks) {
    if (transfer.tail_owner == 0) return;
    const std::size_t nodes = transfer.nodes.size();
    const std::span<const BlockId> device = std::span(transfer.device_blocks).subspan(nodes);
    const std::span<const BlockId> host = std::span(transfer.host_blocks).subspan(nodes);
    if (transfer.orphaned) {
        for (const BlockId id : device) device_.give_back(id);
        take_host_back(host);
        return;
    }
    Lease& lease = lease_at(transfer.tail_owner);
    if (transfer.direction == Direction::kOffload) {
        finish_swap_out(lease, good_blocks == transfer.device_blocks.size());
        return;
    }
    take_host_back(host);
    if (good_blocks == transfer.device_blocks.size() || good_blocks < nodes) return;
    const auto good = static_cast<std::uint32_t>(lease.path.size() + good_blocks - nodes);
    fail_lease(lease, good);
}

// A second lease on the same blocks. What is not indexed gets ids of its own, and what of that is
// computed has to be copied on the device, source to target, in `step`.
Fork Core::fork(LeaseId id, Step step) {
    const Lease& parent = lease(id);
    if (!parent.granted || parent.failed || !parent.onloads.empty() || parent.swap_out != 0) {
        throw LeaseError("only a granted lease whose transfers have ended can be forked");
    }
    if (!windows_.empty()) throw UsageError("a lease with sliding windows cannot be forked");
    require_lease_slot();
    std::uint32_t needed = 0;
    for (std::size_t i = 0; i < parent.table.size(); ++i) needed += !is_indexed(parent, i);
    if (state_ && (!parent.computes || state_->room() == 0)) return {};
    if (needed > device_.free_blocks() + evictable() || !make_room(needed)) return {};

    const LeaseId child_id = open_lease(parent.tokens, parent.context, parent.reads, parent.writes);
    Lease& source = lease_at(id);  // the deque may have grown, but elements stay in place
    Lease& child = lease_at(child_id);
    Fork fork{child_id, {}, {}};
    child.path = source.path;
    child.items = source.items;
    child.item_keys = source.item_keys;
    for (const ItemKey key : child.item_keys) {
        if (key != kNoItems) tree_.item_keys().ref(key);
    }
    for (const NodeId node : child.path) ++tree_[node].refs;
    child.table.resize(source.table.size());
    for (std::size_t i = 0; i < child.table.size(); ++i) {
        if (is_indexed(source, i)) {
            child.table[i] = tree_[source.path[i]].device;
            continue;
        }
        device_.take(std::span(child.table).subspan(i, 1));
        if (i >= blocks_for(source.computed_tokens)) continue;
        fork.source_blocks.push_back(source.table[i]);
        fork.target_blocks.push_back(child.table[i]);
        device_.use_in(source.table[i], step);
        device_.use_in(child.table[i], step);
    }
    child.num_tokens = source.num_tokens;
    child.computed_tokens = child.cached_tokens = source.computed_tokens;
    child.prompt_tokens = source.prompt_tokens;
    child.device_hit = blocks_for(source.computed_tokens);
    child.epoch = source.epoch;
    source.last_step = std::max(source.last_step, step);
    child.last_step = step;
    child.grown_blocks = source.grown_blocks;
    set_granted(child, true);
    if (state_) {
        child.state_slot = take_slot();
        child.state_valid = true;
        state_->use_in(source.state_slot, step);
        state_->use_in(child.state_slot, step);
    }
    return fork;
}

}  // namespace aiokv
