// Snapshots of recurrent state in host memory: copies of those on the device.
//
//   snapshot on the device -> queued -> being saved: a transfer owns the host slot -> host snapshot
//
// The write policy of the blocks says when a snapshot is queued. A host snapshot stays when the
// device slot of its snapshot is evicted, and goes with its block; the least recently used one
// makes room for another. While a transfer copies a snapshot, it is a reader of its source: the
// source is not evicted, and a source that is dropped is freed by the last reader (I3).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/auxiliary_pool.hpp"
#include "aiokv/auxiliary_store.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class HostSnapshots {
  public:
    // `device`: the snapshots on the device.
    HostSnapshots(const CoreConfig& config, Index& index, AuxiliaryPool& device,
                  TransferLedger& transfers, StoredBlocks& stored, Residency& residency);

    // -- hits
    bool covers(std::span<const NodeId> path, std::size_t blocks) const {
        return pool_.covers(index_.tree(), path, blocks);
    }
    BlockId find(NodeId node) const { return pool_.find(node); }
    void touch(NodeId node) {
        const BlockId slot = pool_.find(node);
        if (slot != kNoBlock) pool_.touch(slot);
    }
    void forget(NodeId node) { pool_.forget(node); }
    void forget_all() { pool_.forget_all(); }
    void add_reader(BlockId slot) { pool_.add_reader(slot); }
    void remove_reader(BlockId slot) { pool_.remove_reader(slot); }
    // A snapshot whose copy to the device failed is dropped: the copy might fail again.
    void finish_read(BlockId slot, bool failed);

    // -- saves
    // The snapshot in this device slot was attached or hit.
    void note_use(BlockId device_slot);
    // Device slots were taken: with write-back, the next to be evicted are looked at.
    void note_taken() { looks_ahead_ = looks_ahead_ || is_write_back(); }
    bool wants_saves() const { return looks_ahead_ || !queue_.empty(); }
    // Begins to copy one snapshot; 0: none can be copied now. Snapshots of an open step wait for
    // its end; those for which the host has no room are not saved.
    TransferId take_save();
    // After a success, the host slot belongs to the node of its source, unless that was dropped, or
    // a store has brought the snapshot meanwhile.
    void finish_save(const StateMove& save, bool copied);

    // -- stores
    AuxiliaryStore* stores() { return stores_ ? &*stores_ : nullptr; }  // null: none has snapshots
    // A lease is granted that uses the snapshot of the node, in either tier.
    void note_hit(NodeId node) {
        if (stores_) stores_->note_use(node);
    }

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report, const LeaseTable& leases) const;

  private:
    bool is_write_back() const { return config_.write_policy == WritePolicy::kWriteBack; }
    bool is_used_enough(NodeId node) const;
    bool is_unsaved(BlockId device_slot) const;
    void queue(BlockId device_slot);
    void queue_next_evicted();
    BlockId take_queued();

    const CoreConfig& config_;
    Index& index_;
    AuxiliaryPool& device_;
    TransferLedger& transfers_;
    AuxiliaryPool pool_;
    std::optional<AuxiliaryStore> stores_;
    std::vector<BlockId> queue_;     // device slots; some have another snapshot by now, or none
    std::vector<bool> being_saved_;  // by device slot
    bool looks_ahead_ = false;
    std::uint64_t saved_ = 0;
    std::uint64_t evicted_ = 0;
};

}  // namespace aiokv
