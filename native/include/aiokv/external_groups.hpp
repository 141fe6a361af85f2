// Block groups besides attention whose device blocks a server owns.
//
// The ids of all groups are those of one pool of the server, which names them in assign(): one id,
// or none, per group and block. A grant pins the host copies that the hit needs; the first assign()
// begins to copy them to the server's ids, as one move per group. A commit saves the ids of the
// blocks that it covers and then forgets them, because the server may free a block behind a window
// while the lease goes on. Transfers in flight are known to DeviceUses. An onload of a group counts
// as a writer of the last attention id of the hit too: leases that share it may have blocks that
// were computed from the hit, without an id that the onload writes.
//
// A copy belongs to a node of the tree. Until its block of attention has a node (ExternalSaves), a
// save is known by that block:
//
//   queued -> copying -> proven, waits for the node -> attached to the node
//
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/block_group.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/device_uses.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// Where a block that is being saved will be in the tree: behind or at a node, or behind or at
// (kSaveBit | id) another block that is being saved.
using SavePlace = std::uint64_t;
constexpr SavePlace kSaveBit = SavePlace{1} << 32;

class ExternalGroups {
  public:
    ExternalGroups(const CoreConfig& config, DevicePool& device, const LeaseTable& leases,
                   Index& index, TransferLedger& transfers, DeviceUses& uses);

    std::deque<BlockGroup>& groups() { return groups_; }
    bool exist() const { return !groups_.empty(); }

    // -- leases
    // Pins the host copies of the hit. Call with a grant, after the path is final.
    void take(Lease& lease);
    // Drops the pins and the ids of the lease. Its transfers go on.
    void release(Lease& lease);
    // Throws LeaseError unless `ids`, one row per group, has the ids into which the copies of the
    // hit from block `first` on are to be copied.
    void check_hit(const Lease& lease, std::span<const BlockId> ids, std::size_t first) const;
    // Appends the ids, one row per group, of the blocks from `old` on; none if there are no rows.
    // The ids of the first `computed` blocks may still be written by onloads of other leases.
    void name(Lease& lease, std::span<const BlockId> ids, std::size_t old, std::size_t computed);
    // Copies the hit from block `first` on to the ids of the lease, and drops the other pins.
    void begin_onloads(Lease& lease, std::size_t first);
    void truncate(Lease& lease, std::size_t blocks);
    // Call when `step` computes the blocks up to `end`. Saves of their ids then wait for the step.
    void use_computed(const Lease& lease, std::size_t end, Step step);
    // Returns true if an onload of another lease writes ids that this lease reads.
    bool awaits_onload(Lease& lease) const;

    // -- saves
    // Queues saves of the ids that the lease has for the block, for the groups without a copy.
    // Returns their number.
    std::uint32_t save(const Lease& lease, std::size_t block, SavePlace place);
    // Forgets the ids of the first `blocks` blocks.
    void forget_ids(Lease& lease, std::size_t blocks);
    // Call when a block of attention that is being saved got its node, or will get none.
    void settle(SaveId block, NodeId node);
    void lose(SaveId block);
    // Call when the node was dropped.
    void forget(NodeId node);
    // See ExternalSaves.
    void note_overwritten(BlockId device);
    bool wants_saves() const;
    // Begins to copy the queued ids of one group. Returns 0 if there are none.
    TransferId take_save();
    void give_up_queue();

    // -- transfers
    // Call when the lease of the move gives its ids up.
    void orphan_move(TransferId id) { transfers_.orphan_move(id); }
    // Call after the end of a move. The first `good` ids are proven. Returns other leases that read
    // ids which the move has not written.
    std::vector<LeaseId> finish_move(TransferId id, const Move& move, std::uint32_t good,
                                     bool failed);
    // Returns the newest step that transfers of the lease's ids wait for; 0 if there is none.
    Step after_step(LeaseId lease) const;

    void check(Report& report) const;

  private:
    enum class State : std::uint8_t { kFree, kQueued, kCopying, kProven, kLost };
    struct Save {
        State state = State::kFree;
        bool overwritten = false;
        GroupId group = 0;
        SavePlace place = 0;
        BlockId device = kNoBlock;
        BlockId host = kNoBlock;
        LeaseId reader = 0;  // lease that has named the id
    };
    using SaveIndex = std::uint32_t;
    struct InFlight {
        LeaseId named_by = 0;          // of an onload
        BlockId hit_end = kNoBlock;    // of an onload: last attention id of the hit
        std::vector<SaveIndex> saves;  // of a save
    };

    template <class Visit>
    static void for_each_needed(const BlockGroup& group, std::size_t hits, Visit visit);
    BlockGroup& at(GroupId group) { return groups_[static_cast<std::size_t>(group)]; }
    std::vector<LeaseId> readers_of(std::span<const BlockId> ids, BlockId hit_end) const;
    BlockId named(const Lease& lease, std::size_t group, std::size_t block) const;
    void unlink(const Save& save) { by_place_.erase({save.group, save.place}); }
    void lose_at(SaveIndex index);
    void free(SaveIndex index);
    void attach(SaveIndex index);

    const CoreConfig& config_;
    DevicePool& device_;
    const LeaseTable& leases_;
    Index& index_;
    TransferLedger& transfers_;
    DeviceUses& uses_;
    std::deque<BlockGroup> groups_;

    std::deque<Save> saves_;
    std::vector<SaveIndex> free_;
    std::map<std::pair<GroupId, SavePlace>, SaveIndex> by_place_;  // saves that are not lost
    std::vector<std::vector<SaveIndex>> queues_;  // per group; includes lost saves until taken
    std::unordered_map<TransferId, InFlight> in_flight_;
};

}  // namespace aiokv
