#include "aiokv/swaps.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

TransferId Swaps::saving(const Lease& lease) const {
    const PrefixTree& tree = index_.tree();
    const auto is_being_saved = [&tree](NodeId node) { return tree[node].has(kHostLoading); };
    if (lease.is(LeaseState::kSwapping)) return 0;
    const auto node = std::find_if(lease.path.begin(), lease.path.end(), is_being_saved);
    return node == lease.path.end() ? 0 : transfers_.offload_of(*node);
}

bool Swaps::begin(Lease& lease, Step step) {
    if (!lease.is(LeaseState::kGranted) || !lease.onloads.empty()) {
        throw LeaseError("preempt: only a granted lease whose transfers have ended can be swapped")
            .of(lease.id())
            .hint("await layers.wait_all() first");
    }
    if (lease.batches > 0) {
        throw LeaseError("preempt: a batch computes with the lease; let it end before the swap")
            .of(lease.id());
    }
    if (!index_.is_of_epoch(lease) || index_.attached_blocks(lease) < lease.path.size()) {
        return false;
    }
    const PrefixTree& tree = index_.tree();
    const std::size_t first = lease.path.size();
    const std::size_t computed = config_.blocks_for(lease.computed_tokens);
    const std::span<const BlockId> tail =
        std::span(lease.table).subspan(first, std::max(computed, first) - first);
    residency_.hold(lease.path);
    std::vector<NodeId> unsaved;
    for (const NodeId node : lease.path) {
        if (!tree[node].has(kHostValid | kHostLoading)) unsaved.push_back(node);
    }
    const std::size_t needed = unsaved.size() + tail.size();
    if (residency_.could_make_host_room(needed)) residency_.make_host_room(needed, 0);
    if (host_.free_blocks() < needed) {
        residency_.unhold(lease.path);
        return false;
    }
    promises_.withdraw(lease);
    leases_.move(lease, LeaseState::kSwapping);
    if (needed > 0) {
        lease.tail_host.resize(tail.size());
        host_.take(lease.tail_host);
        lease.swap_transfer =
            saver_.start_offload(std::move(unsaved), {lease.id(), tail, lease.tail_host});
    }
    // The copy waits only for the steps that computed the blocks. The next owner of their ids waits
    // for all steps.
    const Step last = lease.last_use(step);
    device_.use_in(lease.table, last);
    auxiliary_.use_in(lease, last);
    if (needed == 0) finish(lease, true);
    return true;
}

void Swaps::finish(Lease& lease, bool copied) {
    lease.swap_transfer = 0;
    if (!copied) {
        residency_.free_host(lease.tail_host);
        lease.tail_host.clear();
        residency_.unhold(lease.path);
        leases_.move(lease, LeaseState::kGranted);
        publication_.announce(lease);
        return;
    }
    uses_.forget(lease);  // the flagged node may be dropped once the lease has no refs
    residency_.free_table(lease, 0);
    leases_.move(lease, LeaseState::kSwapped);
    lease.num_tokens = 0;
    trim(lease);
}

void Swaps::drop(Lease& lease) {
    residency_.unhold(lease.path);
    residency_.free_host(lease.tail_host);
    lease.tail_host.clear();
}

void Swaps::trim(Lease& lease) {
    const PrefixTree& tree = index_.tree();
    const bool is_current = index_.is_of_epoch(lease);
    std::size_t intact = 0;
    for (; is_current && intact < lease.path.size(); ++intact) {
        const Node& n = tree[lease.path[intact]];
        if (n.has(kDetached) || !n.has(kDeviceResident | kHostValid)) break;
    }
    if (is_current && intact == lease.path.size() && auxiliary_.are_kept(lease)) return;
    intact = matching_.reachable(lease, intact);
    lease.recurrent.valid = false;
    windows_.release(lease, 0);
    residency_.unhold(std::span(lease.path).subspan(intact));
    lease.path.resize(intact);
    residency_.free_host(lease.tail_host);
    lease.tail_host.clear();
    lease.computed_tokens = static_cast<std::uint32_t>(intact) * config_.block_tokens;
}

// A swapped lease keeps its state slot and windows only until another lease needs them: it waits in
// line, and must not delay leases in front of it. Without them, it resumes at the deepest boundary
// that can be hit. While another lease computes, callers wait for its end instead, but a pin may
// never end.
bool Swaps::make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks) {
    if (auxiliary_.has_room(lease, total_blocks)) return true;
    auto victim = may_take_from_swapped() ? leases_.begin() : leases_.end();
    while (!auxiliary_.has_room(lease, total_blocks)) {
        victim = std::find_if(victim, leases_.end(), [&](const Lease& other) {
            return other.is(LeaseState::kSwapped) && &other != &lease &&
                   AuxiliaryGroups::has_ids(other);
        });
        if (victim == leases_.end()) return false;
        auxiliary_.release(*victim, 0);
        trim(*victim);
    }
    return true;
}

bool Swaps::could_make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks,
                                      bool& frees_host, std::vector<NodeId>& unheld) const {
    if (auxiliary_.has_room(lease, total_blocks)) return true;
    if (!may_take_from_swapped()) return false;
    const PrefixTree& tree = index_.tree();
    bool has_state = state_.has_room(lease);
    std::vector<std::uint64_t> given_up;
    for (const Lease& victim : leases_) {
        if (has_state && windows_.has_room(lease, total_blocks, given_up)) return true;
        if (!victim.is(LeaseState::kSwapped) || &victim == &lease) continue;
        if (!AuxiliaryGroups::has_ids(victim)) continue;
        has_state =
            has_state || victim.recurrent.slot != kNoBlock || !victim.recurrent.snapshots.empty();
        windows_.give_up(victim, given_up);
        frees_host = frees_host || !victim.tail_host.empty();
        for (std::size_t i = matching_.reachable(victim, victim.path.size());
             i < victim.path.size(); ++i) {
            const Node& n = tree[victim.path[i]];
            if (n.holds != 1) continue;
            frees_host = frees_host || (tree.refs(victim.path[i]) == 0 && !n.has(kDeviceResident) &&
                                        !tree.has_child(victim.path[i]));
            if (n.has(kDeviceValid) && n.has(kHostValid)) unheld.push_back(victim.path[i]);
        }
    }
    return has_state && windows_.has_room(lease, total_blocks, given_up);
}

std::size_t Swaps::tail_under_way(const Lease& lease) const {
    for (const TransferId id : lease.onloads) {
        if (transfers_.is_move(id)) continue;
        const Transfer& transfer = transfers_.get(id);
        if (transfer.has_tail_of(lease.id())) return transfer.tail_blocks();
    }
    return 0;
}

void Swaps::orphan_tail(Lease& lease, TransferId id, Step step) {
    const Transfer& transfer = transfers_.get(id);
    const auto tail = std::span(transfer.device_blocks).subspan(transfer.nodes.size());
    for (const BlockId block : tail) device_.use_in(block, step);
    const auto begin = lease.table.begin() + static_cast<std::ptrdiff_t>(lease.path.size());
    lease.table.erase(begin, begin + static_cast<std::ptrdiff_t>(tail.size()));
    transfers_.orphan_tail(id);
    if (lease.swap_transfer != id) return;
    residency_.unhold(lease.path);
    lease.tail_host.clear();
    lease.swap_transfer = 0;
}

void Swaps::check(Report& report) const {
    for (const Lease& lease : leases_) {
        const bool is_swapped = lease.is(LeaseState::kSwapped);
        if (!is_swapped && !lease.is(LeaseState::kSwapping)) continue;
        for (const NodeId node : lease.path) ++report.holds[node];
        if (!is_swapped) continue;
        for (const BlockId id : lease.tail_host) report.host.own(id, "a swapped lease");
    }
}

}  // namespace aiokv
