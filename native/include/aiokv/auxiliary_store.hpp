// The copies of a block group besides attention that stores have: saves of host copies (SaveQueue),
// and fetches of them.
//
//   in no tier -> being fetched: the fetch owns the host id, and holds the node -> host copy
//
// A copy is fetched when its block of attention is in the tree: a fetch of that block comes first.
// Only complete() attaches a fetched copy, and only if it is proven (I4); when its block has been
// dropped meanwhile, such as by a reset, the copy is dropped, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/group_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/save_queue.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Report;
class Residency;

// Host copies of a group by their ids; see SaveQueue. A save is one of the readers of a copy.
class HostIds {
  public:
    using Key = BlockId;

    explicit HostIds(GroupPool& pool) : pool_(pool), flags_(pool.capacity(), 0) {}

    // Call when the id gets another copy, after the last one was evicted or dropped. Returns true
    // if a save of the last copy was queued.
    bool renew(BlockId id, std::uint8_t flags);

    bool is_live(BlockId) const { return true; }
    bool is_indexed(BlockId id) const { return pool_.is_attached(id); }
    bool exists(BlockId id) const { return pool_.is_attached(id); }
    NodeId node_of(BlockId id) const { return pool_.node_of(id); }
    BlockId host_id(BlockId id) const { return id; }
    bool has(BlockId id, std::uint8_t flags) const { return (flags_[at(id)] & flags) != 0; }
    void set(BlockId id, std::uint8_t flags) { flags_[at(id)] |= flags; }
    void clear(BlockId id, std::uint8_t flags) {
        flags_[at(id)] &= static_cast<std::uint8_t>(~flags);
    }
    bool wants_look_ahead() const { return is_renewed_; }
    std::vector<BlockId> next_evicted();
    void begin_save(std::span<const BlockId> ids);
    void finish_save(std::span<const BlockId> ids);
    template <class Visit>
    void for_each(Visit visit) const {
        for (std::size_t id = 0; id < flags_.size(); ++id) visit(static_cast<BlockId>(id));
    }

  private:
    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }

    GroupPool& pool_;
    std::vector<std::uint8_t> flags_;  // by host id
    bool is_renewed_ = false;          // whether an id was renewed since next_evicted()
};

class AuxiliaryStore {
  public:
    // `device`, `host`: the ids of the group on the device, and its copies in host memory.
    AuxiliaryStore(const CoreConfig& config, Index& index, StoredBlocks& stored,
                   Residency& residency, TransferLedger& transfers, GroupPool& device,
                   GroupPool& host, GroupId group);

    GroupId group() const { return group_; }
    std::uint32_t tail_blocks() const { return device_.tail_blocks(); }
    std::uint32_t head_blocks() const { return device_.head_blocks(); }

    // -- saves
    // The host id has got a copy from the device.
    void note_copy(BlockId id);
    // A lease that uses the ids attached to the node is granted.
    void note_use(NodeId node);
    bool wants_saves() const { return saves_.wants_saves(); }
    TransferId take() { return saves_.take(); }

    // -- fetches
    bool has_copy(NodeId node) const {
        return device_.find(node) != kNoBlock || host_.find(node) != kNoBlock;
    }
    // Begins to fetch the copies that these nodes lack, or returns the fetch in flight that brings
    // the first of them. Returns 0 if no copy is missing, or if the host has no room for all of
    // them.
    TransferId begin_fetch(std::span<const NodeId> nodes);

    // -- both
    bool has(TransferId id) const { return saves_.has(id) || fetches_.contains(id); }
    const StoreTransfer& get(TransferId id) const {
        return saves_.has(id) ? saves_.get(id) : fetches_.at(id);
    }
    // If a fetch failed, its copies before `first_bad` are proven. `results`: results of a save;
    // see SaveQueue::complete().
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                  std::span<const std::uint8_t> results);
    void add_to(GroupStatistics& statistics) const;

    // Adds the host ids that fetches own to `ids`, and counts the saves that read an id as readers.
    void check(Report& report, Ownership& ids, std::vector<std::uint32_t>& readers) const;

  private:
    struct Fetch : StoreTransfer {
        std::vector<NodeId> nodes;  // held
    };

    void renew(BlockId id, std::uint8_t flags);
    void finish_fetch(TransferId id, Outcome outcome, std::uint32_t first_bad);

    Index& index_;
    StoredBlocks& stored_;
    Residency& residency_;
    TransferLedger& transfers_;
    GroupPool& device_;
    GroupPool& host_;
    GroupId group_;
    SaveQueue<HostIds> saves_;
    std::unordered_map<TransferId, Fetch> fetches_;  // in flight
    std::unordered_map<NodeId, TransferId> coming_;  // by node: the fetch in flight
    std::uint64_t fetched_ = 0;
    std::uint64_t unfetched_ = 0;
    std::uint64_t evicted_ = 0;  // ids evicted to make room for fetches
};

}  // namespace aiokv
