// Compute in flight: blocks stay with the batches that compute with them.
//
// A client may disconnect while a thread or a stream still reads and writes its blocks. A batch
// names the leases that it computes with; blocks that such a lease gives back stay out of the pools
// until the last of its batches has ended:
//
//   release   the lease itself waits, without a handle
//   retract   another lease without a handle, the keeper, takes over what it held
//   truncate  likewise, for the blocks that are cut off
//
// A batch ends when the host knows that its work has finished, or when its work belongs to a step,
// whose event covers it. Batches end in any order.
#include <algorithm>
#include <utility>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

BatchId Core::begin_batch(std::span<const LeaseId> ids) {
    std::vector<LeaseId> leases(ids.begin(), ids.end());
    std::sort(leases.begin(), leases.end());
    if (std::adjacent_find(leases.begin(), leases.end()) != leases.end()) {
        throw LeaseError("computing: a lease is listed more than once");
    }
    leases.assign(ids.begin(), ids.end());
    for (const LeaseId id : leases) {
        const Lease& lease = this->lease(id);
        if (!lease.granted)
            throw LeaseError("computing: a lease is not allocated; call allocate first");
        if (lease.swap_out != 0)
            throw LeaseError(
                "computing: a lease is being swapped to host memory; await preempt and resume it");
    }
    for (const LeaseId id : leases) {
        Lease& lease = lease_at(id);
        ++lease.batches;
        lease.named = true;
    }
    batches_.emplace(++last_batch_, std::move(leases));
    return last_batch_;
}

std::vector<LeaseId> Core::end_batch(BatchId id, Step step) {
    const auto found = batches_.find(id);
    if (found == batches_.end()) {
        throw InternalError("batch " + std::to_string(id) + " has not begun, or has ended");
    }
    std::vector<LeaseId> leases = std::move(found->second);
    batches_.erase(found);
    std::erase_if(leases, [&](LeaseId lease_id) {
        Lease& lease = lease_at(lease_id);
        lease.last_step = std::max(lease.last_step, step);
        if (--lease.batches > 0 || !lease.released) return true;
        end_lease(lease_id, lease, step);
        return false;
    });
    return leases;
}

// In ascending order.
std::vector<BatchId> Core::batches(LeaseId id) const {
    std::vector<BatchId> ids;
    if (lease(id).batches == 0) return ids;
    for (const auto& [batch, leases] : batches_) {
        if (std::find(leases.begin(), leases.end(), id) != leases.end()) ids.push_back(batch);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
}

// The newest step that may use what the lease holds. A lease that no batch has named may have been
// computed with at any time, so the open step may use it.
Step Core::last_use(const Lease& lease, Step step) {
    return lease.named ? lease.last_step : std::max(lease.last_step, step);
}

// Makes a lease without a handle hold its blocks until its batches end.
void Core::await_batches(Lease& keeper) {
    set_granted(keeper, true);
    keeper.named = keeper.released = true;
    ++releasing_leases_;
}

// Moves all that a granted lease holds to a keeper, which ends with the batches in flight.
LeaseId Core::set_aside(LeaseId id, Lease& lease) {
    const LeaseId keeper_id = open_lease({}, lease.context, false, false);
    Lease& keeper = lease_at(keeper_id);
    withdraw(lease);
    keeper.path = std::move(lease.path);
    keeper.table = std::move(lease.table);
    keeper.onloads = std::move(lease.onloads);
    keeper.snapshots = std::move(lease.snapshots);
    keeper.windows = std::move(lease.windows);
    keeper.state_slot = std::exchange(lease.state_slot, kNoBlock);
    keeper.held_snapshot = std::exchange(lease.held_snapshot, kNoBlock);
    keeper.state_valid = std::exchange(lease.state_valid, false);
    keeper.num_tokens = lease.num_tokens;
    keeper.computed_tokens = lease.computed_tokens;
    keeper.cached_tokens = lease.cached_tokens;
    keeper.epoch = lease.epoch;
    keeper.computes = lease.computes;
    keeper.failed = lease.failed;
    lease.path.clear();
    lease.table.clear();
    lease.onloads.clear();
    lease.snapshots.clear();
    lease.windows.clear();
    for (const TransferId transfer_id : keeper.onloads) {
        if (is_state_move(transfer_id)) {
            moves_.at(transfer_id).lease = keeper_id;
            continue;
        }
        Transfer& transfer = transfers_.at(transfer_id);
        std::replace(transfer.leases.begin(), transfer.leases.end(), id, keeper_id);
        if (transfer.tail_owner == id) transfer.tail_owner = keeper_id;
    }
    for (auto& [batch, leases] : batches_)
        std::replace(leases.begin(), leases.end(), id, keeper_id);
    keeper.batches = std::exchange(lease.batches, 0);
    keeper.last_step = lease.last_step;
    await_batches(keeper);
    return keeper_id;
}

// Moves the blocks behind the first `blocks` of the table to a keeper; the caller shortens the
// table.
LeaseId Core::cut_table(LeaseId id, Lease& lease, std::size_t blocks) {
    const LeaseId keeper_id = open_lease({}, lease.context, false, false);
    Lease& keeper = lease_at(keeper_id);
    keeper.table.assign(lease.table.begin() + static_cast<std::ptrdiff_t>(blocks),
                        lease.table.end());
    keeper.num_tokens = static_cast<std::uint32_t>(keeper.table.size()) * config_.block_tokens;
    keeper.epoch = lease.epoch;
    keeper.computes = false;
    keeper.last_step = lease.last_step;
    await_batches(keeper);
    for (auto& [batch, leases] : batches_) {
        if (std::find(leases.begin(), leases.end(), id) == leases.end()) continue;
        leases.push_back(keeper_id);
        ++keeper.batches;
    }
    return keeper_id;
}

}  // namespace aiokv
