// Recurrent state (linear attention, state-space layers): slots, and snapshots at block borders.
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

#include "aiokv/auxiliary_pool.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/host_copies.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class RecurrentState {
  public:
    RecurrentState(const CoreConfig& config, Index& index, const LeaseTable& leases,
                   TransferLedger& transfers);

    bool exists() const { return pool_.has_value(); }
    std::uint32_t usable_slots() const { return pool_ ? pool_->free_ids() + pool_->attached() : 0; }

    // -- hits and nodes of the index
    bool covers(std::span<const NodeId> path, std::size_t blocks) const {
        return !pool_ ||
               pool_->covers(index_.tree(), path, blocks, host_ ? &host_->pool() : nullptr);
    }
    void touch_hit(std::span<const NodeId> path) {
        if (pool_ && !path.empty()) touch(path.back());
    }
    void forget(NodeId node) {
        if (pool_) pool_->forget(node);
        if (host_) host_->forget(node);
    }
    // The snapshots of one tier.
    void forget_device() {
        if (pool_) pool_->forget_all();
    }
    void forget_host() {
        if (host_) host_->forget_all();
    }

    // -- the slot of a lease
    bool has_room(const Lease& lease) const {
        return !pool_ || !lease.flags.computes || lease.recurrent.slot != kNoBlock ||
               pool_->room() > 0;
    }
    // The lease still has the state that it stopped with.
    bool is_kept(const Lease& lease) const { return !pool_ || lease.recurrent.valid; }
    // To be called with a grant: the path is final, and has_room() was true.
    void take(Lease& lease);
    bool can_fork(const Lease& parent) const {
        return !pool_ || (parent.flags.computes && pool_->room() > 0);
    }
    // A copy of the parent's slot, to be made in `step`. can_fork() was true.
    void fork(const Lease& parent, Lease& child, Step step);
    void use_in(const Lease& lease, Step step);
    // The unfinished step that uses the slot of the lease, or 0. Requires that it has one.
    Step after_step(const Lease& lease) const { return pool_->after_step(lease.recurrent.slot); }
    // The lease gives its slot back while the move writes it: the move owns the slot from now on
    // (I3).
    void orphan_move(Lease& lease, TransferId move, Step step);
    // After the end of a move.
    void finish_move(const Move& move, Outcome outcome);
    void release(Lease& lease, Step step);

    // -- snapshots
    // The state after exactly the committed positions, for their last block. The caller makes the
    // copy in `step`, before anything that changes the state again.
    StateCopy snapshot(Lease& lease, std::int64_t num_tokens, Step step);
    // The copy was not made: no lease may hit there.
    void discard_snapshot(Lease& lease, BlockId slot);
    // Of blocks that are indexed by now.
    void attach_snapshots(Lease& lease);
    void forget_snapshots(Lease& lease, Step step);

    // -- saves of snapshots to host memory; see HostCopies
    bool wants_saves() const { return host_ && host_->wants_saves(); }
    TransferId take_save() { return host_ ? host_->take_save(1) : 0; }

    void close_step(Step step) {
        if (pool_) pool_->close_step(step);
    }
    void finish_step(Step step) {
        if (pool_) pool_->finish_step(step);
    }
    Step unfinished_step() const { return pool_ ? pool_->unfinished_step() : 0; }

    // -- stores
    // To be called once, before the first lease, where stores have the host snapshots, too.
    void connect_stores(StoredBlocks& stored, Residency& residency) {
        if (host_) host_->connect_stores(stored, residency);
    }
    AuxiliaryStore* stores() { return host_ ? host_->stores() : nullptr; }  // null: not connected

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    BlockId take_slot();
    void touch(NodeId node);
    void keep_snapshot(Lease& lease, BlockId source, BlockId host_source);
    void start_move(Lease& lease, BlockId source, MoveRoute route);

    const CoreConfig& config_;
    Index& index_;
    const LeaseTable& leases_;
    TransferLedger& transfers_;
    std::optional<AuxiliaryPool> pool_;  // none: the model has no recurrent state
    std::optional<HostCopies> host_;     // none: snapshots stay on the device
    std::uint64_t restored_ = 0;
    std::uint64_t onloaded_ = 0;
    std::uint64_t evicted_snapshots_ = 0;
};

}  // namespace aiokv
