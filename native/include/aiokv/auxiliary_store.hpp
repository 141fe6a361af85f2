// The copies of one auxiliary pool that stores have: saves of host copies, and fetches of them.
//
//   host copy -> queued -> being saved: the save is one of its readers -> stored
//   in no tier -> being fetched: the fetch owns the host id, and holds the node -> host copy
//
// The store policy of the blocks says when a copy is saved. A copy is fetched when its block is in
// the tree: a fetch of the block itself comes first. Only complete() attaches a fetched copy, and
// only if it is proven (I4); when its block has been dropped meanwhile, such as by a reset, the
// copy is dropped, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/group_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/reuse_sketch.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Report;
class Residency;

// A save or a fetch of host copies.
struct AuxiliaryTransfer {
    bool is_save = false;
    std::vector<NodeId> nodes;  // of a fetch: held
    std::vector<BlockId> ids;   // in the host pool
    std::vector<Digest> digests;
};

class AuxiliaryStore {
  public:
    static constexpr std::size_t kMaxInFlight = 2;  // saves

    // `device`, `host`: the pool on the device, and its copies in host memory. `group`: the window
    // group of the pool, or kRecurrentState.
    AuxiliaryStore(const CoreConfig& config, Index& index, StoredBlocks& stored,
                   Residency& residency, TransferLedger& transfers, GroupPool& device,
                   GroupPool& host, GroupId group);

    GroupId group() const { return group_; }
    std::uint32_t tail_blocks() const { return device_.tail_blocks(); }
    std::uint32_t head_blocks() const { return device_.head_blocks(); }

    // -- saves
    // The host id has got a copy from the device.
    void note_copy(BlockId id);
    // A lease is granted that uses what is attached to the node.
    void note_use(NodeId node);
    bool wants_saves() const;
    // Begins a save of copies that are due. 0: none, or enough in flight.
    TransferId take();

    // -- fetches
    bool has_copy(NodeId node) const {
        return device_.find(node) != kNoBlock || host_.find(node) != kNoBlock;
    }
    // Begins to fetch the copies that these nodes lack, or returns the fetch in flight that brings
    // the first one. 0: they lack none, or there is no room for all.
    TransferId begin_fetch(std::span<const NodeId> nodes);

    // -- both
    bool has(TransferId id) const { return transfers_.contains(id); }
    const AuxiliaryTransfer& get(TransferId id) const { return transfers_.at(id); }
    // Copies before `first_bad` are proven when a fetch failed. `results`: of a save, one per copy,
    // or empty. Throws UsageError, changing nothing, on another number of results.
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                  std::span<const std::uint8_t> results);
    void add_to(GroupStatistics& statistics) const;

    // -- for checks
    // Host ids that saves read, and those that fetches own.
    std::vector<BlockId> read_ids() const { return ids_of(true); }
    std::vector<BlockId> owned_ids() const { return ids_of(false); }
    void check(Report& report) const;

  private:
    struct Counts {
        std::uint64_t saved = 0;
        std::uint64_t unsaved = 0;  // dropped, rejected, refused or failed
        std::uint64_t fetched = 0;
        std::uint64_t unfetched = 0;
        std::uint64_t evicted = 0;  // to make room for fetches
    };
    enum Flag : std::uint8_t {
        kIsStored = 1 << 0,  // a store has the copy, or had it
        kIsQueued = 1 << 1,
        kIsSaving = 1 << 2,
        kIsRefused = 1 << 3,  // tried again after the next use
    };

    bool has_flag(BlockId id, std::uint8_t flags) const {
        return (flags_[static_cast<std::size_t>(id)] & flags) != 0;
    }
    void set(BlockId id, Flag flag) { flags_[static_cast<std::size_t>(id)] |= flag; }
    void clear(BlockId id, Flag flag) {
        flags_[static_cast<std::size_t>(id)] &= static_cast<std::uint8_t>(~flag);
    }
    bool saves_ahead() const { return config_.stores.policy == StorePolicy::kOnEviction; }
    void reset_flags(BlockId id, std::uint8_t flags);
    void queue(BlockId id);
    bool can_save(BlockId id) const;
    bool admit(BlockId id);
    std::vector<BlockId> take_queued();
    std::vector<BlockId> look_ahead();
    void finish_save(const AuxiliaryTransfer& save, Outcome outcome,
                     std::span<const std::uint8_t> results);
    void finish_fetch(const AuxiliaryTransfer& fetch, std::uint32_t good);
    std::vector<BlockId> ids_of(bool saves) const;

    const CoreConfig& config_;
    Index& index_;
    StoredBlocks& stored_;
    Residency& residency_;
    TransferLedger& ledger_;
    GroupPool& device_;
    GroupPool& host_;
    GroupId group_;
    std::size_t max_copies_;              // of a save: saves pin copies of a small pool
    std::optional<ReuseSketch> offered_;  // none: each copy is admitted
    std::vector<std::uint8_t> flags_;     // by host id
    std::deque<BlockId> queue_;           // ids with kIsQueued; stale entries lack the flag
    bool looks_ahead_ = false;            // a copy was attached since look_ahead()
    std::unordered_map<TransferId, AuxiliaryTransfer> transfers_;
    std::size_t saves_ = 0;                          // in flight
    std::unordered_map<NodeId, TransferId> coming_;  // by node: the fetch in flight
    Counts counts_;
};

}  // namespace aiokv
