// Transfers of blocks between a lease and other engines (peers).
//
//   receive   writes blocks of the lease behind its computed positions; commit_received publishes
//             the proven ones
//   send      reads blocks that the lease has computed, the partial last one included
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

#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

using TicketId = std::array<std::uint8_t, 16>;

enum class PeerRoute : std::uint8_t { kReceive, kSend };

struct PeerTransfer {
    PeerRoute route = PeerRoute::kReceive;
    TicketId ticket{};
    LeaseId lease = 0;              // 0: no handle has the blocks any more
    std::uint32_t first_block = 0;  // of the lease's table, and of the prompt
    std::uint32_t end_token = 0;    // of a receive: positions behind it have no bytes
    std::uint32_t kept_blocks = 0;  // that truncate() has not cut off the lease's table
    std::vector<BlockId> blocks;    // on the device
    std::vector<LeaseId> holders;   // each lists the transfer in Lease::peer_transfers
    Step after_step = 0;
    bool cancelling = false;  // nothing waits for it; a worker was, or will be, asked

    bool receives() const { return route == PeerRoute::kReceive; }
    std::uint32_t end_block() const {
        return first_block + static_cast<std::uint32_t>(blocks.size());
    }
};

// The end of a transfer whose lease has a handle.
struct PeerEnd {
    TransferId transfer;
    LeaseId lease;
    std::uint32_t blocks;  // proven: in the device blocks of the lease, or at the receiver
};

class PeerTransfers {
  public:
    PeerTransfers(const CoreConfig& config, const DevicePool& device, LeaseTable& leases,
                  const Index& index, TransferLedger& transfers)
        : config_(config), device_(device), leases_(leases), index_(index), transfers_(transfers) {}

    // Throw LeaseError or UsageError, changing nothing.
    TransferId receive(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                       std::int64_t num_blocks);
    TransferId send(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                    std::int64_t num_blocks);
    // No caller waits for the transfers of this ticket: those in flight are abandoned.
    void end_ticket(const Lease& lease, const TicketId& ticket);
    // Likewise for all transfers: the cached bytes are no longer valid.
    void end_all();

    bool has(TransferId id) const { return in_flight_.contains(id); }
    const PeerTransfer& get(TransferId id) const;  // throws UsageError
    // Returns the released leases that waited for this transfer only.
    std::vector<LeaseId> complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    // Since the last call.
    std::vector<PeerEnd> take_ends();
    // In flight, and not taken before: worth cancelling.
    std::vector<TransferId> take_abandoned();
    bool exist() const { return !in_flight_.empty(); }

    // -- for other transitions. The checks throw LeaseError, changing nothing.
    // Positions that a receive in flight writes are not computed, and not committed.
    void check_commit(const Lease& lease, std::int64_t num_tokens) const {
        if (!lease.peer_transfers.empty()) check_computed(lease, num_tokens);
    }
    void check_compute(const Lease& lease) const;
    void check_swap(const Lease& lease) const;
    // A block that keeps some of its positions must not be in flight: the lease may compute the
    // others anew.
    void check_truncate(const Lease& lease, std::int64_t num_tokens) const;
    // Blocks of the table from `blocks` on are in flight.
    bool use_behind(const Lease& lease, std::size_t blocks) const;
    // The lease gives all its blocks back: no handle has them any more.
    void abandon(Lease& lease);
    // The blocks, and with them the transfers, are those of `keeper` from now on.
    void hand_over(Lease& lease, Lease& keeper);
    // `keeper` takes over the blocks of the table from `blocks` on.
    void cut(Lease& lease, std::size_t blocks, Lease& keeper);

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    struct Counts {
        std::uint64_t begun = 0;
        std::uint64_t failed = 0;
        std::uint64_t blocks = 0;  // proven
    };

    void check_ready(const Lease& lease, const char* verb, std::int64_t first_block,
                     std::int64_t num_blocks) const;
    void check_computed(const Lease& lease, std::int64_t num_tokens) const;
    // The first block that a receive in flight writes.
    std::optional<std::uint32_t> first_receiving(const Lease& lease) const;
    TransferId begin(Lease& lease, PeerRoute route, const TicketId& ticket,
                     std::uint32_t first_block, std::uint32_t num_blocks);
    void give_up(TransferId id, PeerTransfer& transfer);
    void check_transfer(Report& report, TransferId id, const PeerTransfer& transfer) const;
    Counts& counts(PeerRoute route) { return counts_[static_cast<std::size_t>(route)]; }
    const Counts& counts(PeerRoute route) const { return counts_[static_cast<std::size_t>(route)]; }

    const CoreConfig& config_;
    const DevicePool& device_;
    LeaseTable& leases_;
    const Index& index_;
    TransferLedger& transfers_;
    std::unordered_map<TransferId, PeerTransfer> in_flight_;
    std::vector<PeerEnd> ends_;
    std::vector<TransferId> abandoned_;
    std::array<Counts, 2> counts_;  // by route
};

}  // namespace aiokv
