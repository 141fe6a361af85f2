// Transfers of blocks of a group between a lease and other engines (peers).
//
//   receive        writes blocks of the lease behind its computed positions; commit_received
//                  publishes the proven ones
//   send           reads blocks that the lease has computed, the partial last one included; or
//                  some of their ranges of layers
//   send_early     reads ranges of layers of blocks that the lease is computing: never all ranges,
//                  so that the receiver completes no block before it is committed here
//   receive_group  writes the blocks of a group that are needed behind received positions. Of
//                  recurrent state: its end commits these positions, so the state and the positions
//                  that count as computed never differ. Of a window group: the tables of all groups
//                  go there when the first one begins, so that the lease cannot compute before
//                  these positions are committed
//   send_group     reads the blocks of a group that are needed behind the computed positions
//
// A transfer in flight keeps its blocks as a batch of compute does: blocks that the lease gives
// back before the report stay out of the pools until then (I3, I11); see Releases. The holders of a
// transfer are the leases that have its blocks: the lease itself, and keepers. Its lease is the one
// whose handle is told of the end; it has none when the handle gave its blocks back.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/sliding_windows.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// Ranges of layers of each block, with the workers' numbers. 0, 0: whole blocks.
struct LayerRanges {
    std::uint32_t first = 0;
    std::uint32_t end = 0;
};

// Blocks `first` to `end` - 1 of the table of a lease.
struct BlockRange {
    std::uint32_t first;
    std::uint32_t end;
};

struct PeerTransfer {
    bool receives = false;
    GroupId group = kAttention;
    TicketId ticket{};
    LeaseId lease = 0;                  // 0: no handle has the blocks any more
    std::uint32_t end_token = 0;        // end of the positions with bytes; of a state: its position
    std::vector<BlockId> ids;           // on the device, of the group
    std::vector<std::uint32_t> blocks;  // index in the prompt per id; 0 for a state
    std::uint32_t kept_blocks = 0;      // attention blocks that are still in the table
    LayerRanges layers;
    bool is_early = false;         // the lease may still compute the blocks
    std::uint64_t mark = 0;        // of an early send: point in the step that computes the layers
    std::vector<LeaseId> holders;  // each lists the transfer in Lease::peer_transfers
    Step after_step = 0;
    bool cancelling = false;  // no lease waits for it; a worker is asked to cancel it

    bool moves_attention() const { return group == kAttention; }
    std::uint32_t size() const { return static_cast<std::uint32_t>(ids.size()); }
    // Returns the first block of attention, whose blocks are consecutive; 0 for other groups.
    std::uint32_t first_block() const { return moves_attention() ? blocks.front() : 0; }
    std::uint32_t end_block() const { return moves_attention() ? blocks.back() + 1 : 0; }
    std::uint32_t end_kept() const { return first_block() + kept_blocks; }
    bool overlaps(BlockRange range) const {
        return end_block() > range.first && first_block() < range.end;
    }
};

// The end of a transfer whose lease has a handle.
struct PeerEnd {
    TransferId transfer;
    LeaseId lease;
    std::uint32_t blocks;  // proven blocks: in the lease's device blocks, or at the receiver
    bool commits;          // the received positions count as computed now
};

// Effects of the end of a transfer on leases.
struct PeerRelease {
    std::vector<LeaseId> ended;      // released leases that waited only for this transfer
    LeaseId lease = 0;               // lease whose state was received or lost; 0: none
    std::uint32_t state_tokens = 0;  // positions before the state; 0: it was lost
};

class PeerTransfers {
  public:
    PeerTransfers(const CoreConfig& config, const DevicePool& device, LeaseTable& leases,
                  const Index& index, const AuxiliaryGroups& groups, SlidingWindows& windows,
                  TransferLedger& transfers)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          groups_(groups),
          windows_(windows),
          transfers_(transfers) {
        for (std::vector<Counts>& counts : counts_) {
            counts.resize(index_of(0) + config.windows.size());
        }
    }

    // Begins to receive or send the blocks of a group that are needed behind `num_tokens`
    // positions; of attention, the blocks from `first_block` on. Throws LeaseError or UsageError,
    // changing nothing.
    TransferId receive(Lease& lease, const TicketId& ticket, std::int64_t num_tokens, GroupId group,
                       std::int64_t first_block, Step step);
    // With a mark, the sent layers of attention need not be computed yet; they are at the end of
    // `step`.
    TransferId send(Lease& lease, const TicketId& ticket, std::int64_t num_tokens, GroupId group,
                    std::int64_t first_block, LayerRanges layers, std::uint64_t mark, Step step);
    // Abandons the transfers of a ticket. Returns true if the lease has windows of the ticket
    // behind positions that will not be committed.
    bool end_ticket(const Lease& lease, const TicketId& ticket);
    // Abandons all transfers, because the cached bytes are no longer valid.
    void end_all();

    bool has(TransferId id) const { return in_flight_.contains(id); }
    const PeerTransfer& get(TransferId id) const;  // throws UsageError
    PeerRelease complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    // Returns the ends since the last call.
    std::vector<PeerEnd> take_ends();
    // Returns the transfers in flight that were abandoned since the last call: they are worth
    // cancelling.
    std::vector<TransferId> take_abandoned();

    // -- for other transitions. The checks throw LeaseError, changing nothing.
    // Throws LeaseError, changing nothing, as do the checks below. Positions that a receive in
    // flight writes cannot be computed or committed; while the state is in flight, no position can.
    void check_commit(const Lease& lease, std::int64_t num_tokens) const {
        if (lease.peer_transfers.empty() && lease.windows.empty()) return;
        check_positions(lease, num_tokens);
        if (num_tokens > static_cast<std::int64_t>(lease.computed_tokens)) {
            check_windows(lease, "commit", lease.computed_tokens);
        }
    }
    void check_positions(const Lease& lease, std::int64_t num_tokens) const;
    void check_compute(const Lease& lease) const;
    void check_swap(const Lease& lease) const;
    // Checks that all windows that are needed behind these positions have arrived.
    void check_windows(const Lease& lease, const char* verb, std::int64_t num_tokens) const;
    // Checks that the state is not being received, so that it can be copied.
    void check_state_copy(const Lease& lease, const char* verb) const;
    // Checks that no transfer uses the block in which `num_tokens` ends, because the lease may
    // compute the cut positions of that block again.
    void check_truncate(const Lease& lease, std::int64_t num_tokens) const;
    // Returns true if transfers use blocks of the table from `blocks` on.
    bool use_behind(const Lease& lease, std::size_t blocks) const;
    // Call when the lease gives all its blocks back, so that no handle has them.
    void abandon(Lease& lease);
    // Moves the blocks, and with them the transfers, to `keeper`.
    void hand_over(Lease& lease, Lease& keeper);
    // Moves the blocks of the table from `blocks` on, and their transfers, to `keeper`.
    void cut(Lease& lease, std::size_t blocks, Lease& keeper);

    void add_to(CoreStatistics& statistics) const;
    void add_to(GroupStatistics& statistics, GroupId group) const;
    void check(Report& report) const;

  private:
    struct Counts {
        std::uint64_t begun = 0;
        std::uint64_t failed = 0;
        std::uint64_t blocks = 0;  // proven blocks
    };

    TransferId receive_blocks(Lease& lease, const TicketId& ticket, BlockRange range);
    TransferId send_blocks(Lease& lease, const TicketId& ticket, BlockRange range,
                           LayerRanges layers);
    // Begins to send layers of blocks that need not be computed yet.
    TransferId send_early(Lease& lease, const TicketId& ticket, BlockRange range,
                          LayerRanges layers, std::uint64_t mark, Step step);
    // Begins to receive blocks of a group besides attention. The positions before them must be
    // computed or received.
    TransferId receive_group(Lease& lease, const TicketId& ticket, GroupId group,
                             std::int64_t num_tokens, Step step);
    // Begins to send the blocks that the group needs behind exactly the computed positions of the
    // lease.
    TransferId send_group(Lease& lease, const TicketId& ticket, GroupId group,
                          std::int64_t num_tokens);
    void check_ready(const Lease& lease, const char* verb) const;
    // Returns the blocks of a granted lease from `first_block` on to that of the last position.
    BlockRange blocks_of(const Lease& lease, const char* verb, std::int64_t first_block,
                         std::int64_t num_tokens) const;
    void check_group(const Lease& lease, const char* verb, GroupId group) const;
    void check_no_side(const Lease& lease, const char* verb) const;
    void check_received(const Lease& lease, std::int64_t num_tokens) const;
    // Returns the first block that a receive in flight writes.
    std::optional<std::uint32_t> first_receiving(const Lease& lease) const;
    TransferId begin(Lease& lease, PeerTransfer transfer);
    PeerTransfer of_blocks(const Lease& lease, const TicketId& ticket, BlockRange range,
                           bool receives) const;
    TransferId begin_group(Lease& lease, const TicketId& ticket, GroupId group,
                           std::vector<std::uint32_t> blocks, std::uint32_t num_tokens,
                           bool receives);
    bool is_waiting_for_windows(const Lease& lease) const;
    // Returns true if all positions that an early send reads are computed now.
    bool is_computed(const Lease& lease, const PeerTransfer& transfer) const;
    Step after_use(const Lease& lease, Step step) const;
    void note_received(Lease& lease, const PeerTransfer& transfer, std::uint32_t blocks) const;
    void give_up(TransferId id, PeerTransfer& transfer);
    void check_transfer(Report& report, TransferId id, const PeerTransfer& transfer) const;
    Counts& counts(const PeerTransfer& transfer) {
        return counts_[transfer.receives][index_of(transfer.group)];
    }
    static std::size_t index_of(GroupId group) {
        return static_cast<std::size_t>(group - kAttention);
    }

    const CoreConfig& config_;
    const DevicePool& device_;
    LeaseTable& leases_;
    const Index& index_;
    const AuxiliaryGroups& groups_;
    SlidingWindows& windows_;
    TransferLedger& transfers_;
    std::unordered_map<TransferId, PeerTransfer> in_flight_;
    std::vector<PeerEnd> ends_;
    std::vector<TransferId> abandoned_;
    std::array<std::vector<Counts>, 2> counts_;  // of sends, then of receives, by group
};

}  // namespace aiokv
