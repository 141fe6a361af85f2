// Preemption with the whole table moved to host memory.
//
//   table   | path: indexed blocks, by node | tail: computed, not indexed | not computed |
//   swapped | a hold on each host copy      | tail_host                   | nothing      |
//
// A hold keeps a host copy; the device copies may be evicted. Resuming is an allocate whose path
// is known already.
#pragma once

#include <cstdint>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/matching.hpp"
#include "aiokv/publication.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/saver.hpp"
#include "aiokv/transfer_ledger.hpp"
#include "aiokv/uses.hpp"

namespace aiokv {

class Swaps {
  public:
    Swaps(const CoreConfig& config, DevicePool& device, RunPool& host, LeaseTable& leases,
          Index& index, RecurrentState& state, SlidingWindows& windows, AuxiliaryGroups& auxiliary,
          const Matching& matching, Residency& residency, Saver& saver, TransferLedger& transfers,
          Promises& promises, Uses& uses, Publication& publication)
        : config_(config),
          device_(device),
          host_(host),
          leases_(leases),
          index_(index),
          state_(state),
          windows_(windows),
          auxiliary_(auxiliary),
          matching_(matching),
          residency_(residency),
          saver_(saver),
          transfers_(transfers),
          promises_(promises),
          uses_(uses),
          publication_(publication) {}

    // Begins to move the table. If nothing has to be copied, the lease is swapped on return.
    // Returns false, changing nothing, if the host has no room or the cache was reset since the
    // grant.
    bool begin(Lease& lease, Step step);
    // Returns a backup of the lease's blocks that is in flight, or 0. A swap must wait for it: if
    // the backup failed after the swap, a part of the table would be lost.
    TransferId saving(const Lease& lease) const;
    // Ends the move. Gives up the device copies if `copied`, else the host copies.
    void finish(Lease& lease, bool copied);
    // Gives up all blocks behind the first lost one; after a reset, all blocks.
    void trim(Lease& lease);
    // Gives up the host copies of a swapped lease.
    void drop(Lease& lease);
    // Takes state slots and windows from swapped leases until `lease` can be granted
    // `total_blocks`. Returns false if they do not suffice.
    bool make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks);
    // Returns what make_auxiliary_room() would return; changes nothing. Sets `frees_host` if host
    // blocks would become free.
    bool could_make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks, bool& frees_host,
                                   std::vector<NodeId>& unheld) const;

    // -- the tail, which a transfer copies with the path
    // Returns the number of blocks behind the path that a transfer in flight brings back to a
    // resumed lease.
    std::size_t tail_under_way(const Lease& lease) const;
    // Call when the lease gives its tail back while a transfer copies it. The transfer owns the ids
    // from now on (I3).
    void orphan_tail(Lease& lease, TransferId id, Step step);

    void check(Report& report) const;

  private:
    bool may_take_from_swapped() const {
        return !transfers_.has_moves() && leases_.computing() == 0;
    }

    const CoreConfig& config_;
    DevicePool& device_;
    RunPool& host_;
    LeaseTable& leases_;
    Index& index_;
    RecurrentState& state_;
    SlidingWindows& windows_;
    AuxiliaryGroups& auxiliary_;
    const Matching& matching_;
    Residency& residency_;
    Saver& saver_;
    TransferLedger& transfers_;
    Promises& promises_;
    Uses& uses_;
    Publication& publication_;
};

}  // namespace aiokv
