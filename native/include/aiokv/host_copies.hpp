// Host copies of the ids of an auxiliary pool: snapshots of recurrent state, or window blocks.
//
//   id on the device -> queued -> being saved: a move owns the host id -> host copy of the node
//
// The write policy of the blocks says when an id is queued. A host copy stays when the device id of
// its node is evicted, and goes with its node; the least recently used one makes room for another.
// While a move saves an id, it is a reader of its source: the source is not evicted, and a source
// whose node is dropped is freed by the last reader (I3).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/auxiliary_store.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/group_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Report;

class HostCopies {
  public:
    // `device`: the pool of the ids on the device.
    HostCopies(const CoreConfig& config, Index& index, GroupPool& device, TransferLedger& transfers,
               std::uint32_t capacity, GroupId group);

    HostCopies(const HostCopies&) = delete;
    HostCopies& operator=(const HostCopies&) = delete;

    const GroupPool& pool() const { return pool_; }
    GroupPool& pool() { return pool_; }

    // -- hits
    // A copy that could not be read is dropped: another read might fail again.
    void finish_read(BlockId id, bool failed);

    // -- saves
    // Call when this device id was attached or hit.
    void note_use(BlockId device_id);
    // Call when device ids were taken. With write-back, the next call checks which ids are evicted
    // next.
    void note_taken() { looks_ahead_ = looks_ahead_ || is_write_back(); }
    bool wants_saves() const { return looks_ahead_ || !queue_.empty(); }
    // Begins to copy up to `limit` ids. Returns 0 if none can be copied now. Ids of an open step
    // wait for its end. Ids for which the host has no room are not saved.
    TransferId take_save(std::uint32_t limit);
    // Attaches the first `good` host ids to the nodes of their sources, except where the node was
    // dropped or stores have brought its copy.
    void finish_save(const Move& save, std::uint32_t good);

    // Takes a host id. Evicts an idle one when none is free. Requires pool().room() > 0.
    BlockId take();
    // Attaches the caller's host id, which has arrived, to a node without one.
    void attach(NodeId node, BlockId id);

    // -- stores
    // Call once, before the first save.
    void connect_stores(StoredBlocks& stored, Residency& residency) {
        stores_.emplace(config_, index_, stored, residency, transfers_, device_, pool_, group_);
    }
    AuxiliaryStore* stores() { return stores_ ? &*stores_ : nullptr; }  // null: not connected
    // Call when a lease that uses the ids attached to the node is granted.
    void note_hit(NodeId node) {
        if (stores_) stores_->note_use(node);
    }

    void add_to(GroupStatistics& statistics) const;
    // `readers`: number of readers per host id, without the moves and the stores. `owned`: ids of
    // ExternalGroups.
    void check(Report& report, std::vector<std::uint32_t> readers,
               std::span<const BlockId> owned) const;

  private:
    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }
    bool is_write_back() const { return config_.write_policy == SavePolicy::kWriteBack; }
    bool is_unsaved(BlockId device_id) const;
    void queue(BlockId device_id);
    void queue_next_evicted();
    std::vector<BlockId> take_queued(std::uint32_t limit);

    const CoreConfig& config_;
    Index& index_;
    GroupPool& device_;
    TransferLedger& transfers_;
    GroupPool pool_;
    GroupId group_;
    std::optional<AuxiliaryStore> stores_;  // none: stores do not keep the host copies
    std::vector<BlockId> queue_;     // device ids; some may have another node by now, or none
    std::vector<bool> is_queued_;    // by device id
    std::vector<bool> being_saved_;  // by device id
    bool looks_ahead_ = false;
    std::uint64_t saved_ = 0;
    std::uint64_t evicted_ = 0;
};

}  // namespace aiokv
