// Recurrent state (linear attention, state-space layers): slots, and snapshots at block boundaries.
//
// State cannot be read again up to a shorter prefix, so a granted lease has a slot of its own that
// the model overwrites, and a prefix can be hit only where a snapshot was saved: the state
// after the last position of that block. A grant copies the snapshot into the lease's slot, or
// zeroes the slot, as a transfer that the lease waits for. Snapshots have an eviction order of
// their own; to lose one costs no block. Host snapshots (HostCopies) are copies of them that
// stay when they are evicted; a lease takes its state from the device where it has the choice.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "aiokv/block_group.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class RecurrentState {
  public:
    RecurrentState(const CoreConfig& config, Index& index, const LeaseTable& leases,
                   TransferLedger& transfers);

    BlockGroup* group() { return group_ ? &*group_ : nullptr; }  // null: the model has no state

    bool exists() const { return group_.has_value(); }
    std::uint32_t usable_slots() const {
        return group_ ? group_->pool.free_ids() + group_->pool.attached() : 0;
    }

    // -- the slot of a lease
    bool has_room(const Lease& lease) const {
        return !group_ || !lease.flags.computes || lease.recurrent.slot != kNoBlock ||
               group_->pool.room() > 0;
    }
    // Returns true if a swapped lease still has its state.
    bool is_kept(const Lease& lease) const { return !group_ || lease.recurrent.valid; }
    // Call with a grant, after the path is final and has_room() was true.
    void take(Lease& lease);
    bool can_fork(const Lease& parent) const {
        return !group_ || (parent.flags.computes && group_->pool.room() > 0);
    }
    // Returns the copy of the parent's slot to make in `step`. Requires can_fork().
    void fork(const Lease& parent, Lease& child, Step step);
    void use_in(const Lease& lease, Step step);
    // Call when the lease gives its slot back while the move writes it. The move owns the slot from
    // now on (I3).
    void orphan_move(Lease& lease, TransferId move, Step step);
    // Call after the end of a move.
    void finish_move(const Move& move, Outcome outcome);
    void release(Lease& lease, Step step);

    // -- snapshots
    // Takes a slot for a snapshot of the state behind exactly the committed positions. The caller
    // makes the returned copy in `step`, before the state changes again.
    StateCopy snapshot(Lease& lease, std::int64_t num_tokens, Step step);
    // Call when the copy was not made, so that no lease hits the snapshot.
    void discard_snapshot(Lease& lease, BlockId slot);
    // Attaches snapshots whose blocks were indexed since they were saved.
    void attach_snapshots(Lease& lease);
    void forget_snapshots(Lease& lease, Step step);

    // Begins a save of one snapshot to host memory. Returns 0 if there is nothing to copy. See
    // HostCopies.
    TransferId take_save() { return group_ && group_->host ? group_->host->take_save(1) : 0; }

    void check(Report& report) const;

  private:
    void keep_snapshot(Lease& lease, BlockId source, BlockId host_source);
    void start_move(Lease& lease, BlockId source, MoveRoute route);

    const CoreConfig& config_;
    Index& index_;
    const LeaseTable& leases_;
    TransferLedger& transfers_;
    std::optional<BlockGroup> group_;  // none: the model has no recurrent state
};

}  // namespace aiokv
