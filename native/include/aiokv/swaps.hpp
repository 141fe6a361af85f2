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

    // Begins to move the table; the lease is swapped already when nothing had to be copied. Returns
    // false, changing nothing, when the host has no room or the cache was reset under the lease.
    bool begin(Lease& lease, Step step);
    // A backup of the lease's blocks that is under way, or 0. If it fails, a swap that counted on
    // it would have lost a part of the table: it has to end first.
    TransferId saving(const Lease& lease) const;
    // All or nothing: either the device side is given up, or the host side.
    void finish(Lease& lease, bool copied);
    // Gives up all behind the first block that was lost; after a reset, everything.
    void trim(Lease& lease);
    // Gives up the host copies of a swapped lease.
    void drop(Lease& lease);
    // Takes state slots and windows from swapped leases, as far as `lease` needs them to be granted
    // `total_blocks`. Returns false when there is not enough room.
    bool make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks);
    // make_auxiliary_room(), changing nothing. `frees_host`: host blocks would come free.
    bool could_make_auxiliary_room(const Lease& lease, std::uint32_t total_blocks, bool& frees_host,
                                   std::vector<NodeId>& unheld) const;

    // -- the tail, which a transfer copies with the path
    // Blocks behind the path that a resumed lease gets back by a transfer under way.
    std::size_t tail_under_way(const Lease& lease) const;
    // The lease gives its tail back while a transfer copies it: the transfer owns the ids from now
    // on (I3).
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
