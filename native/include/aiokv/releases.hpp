// Verbs with which leases give blocks back: release, retract, truncate.
//
// A client may disconnect while a thread or a stream still reads and writes its blocks, or while
// they are received from a peer or sent to one. Blocks that a lease gives back while batches
// compute with it, or transfers of peers use it, stay out of the pools until the last of these
// batches and transfers has ended:
//
//   release   the lease itself waits, without a handle
//   retract   another lease without a handle, the keeper, takes over what it held
//   truncate  likewise, for the blocks that are cut off
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/batches.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/external_blocks.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/peer_transfers.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/swaps.hpp"
#include "aiokv/transfer_ledger.hpp"
#include "aiokv/uses.hpp"

namespace aiokv {

class Releases {
  public:
    Releases(const CoreConfig& config, DevicePool& device, LeaseTable& leases, Index& index,
             RecurrentState& state, SlidingWindows& windows, AuxiliaryGroups& auxiliary,
             Residency& residency, TransferLedger& transfers, Promises& promises, Uses& uses,
             Batches& batches, PeerTransfers& peers, Swaps& swaps, ExternalBlocks& external)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          state_(state),
          windows_(windows),
          auxiliary_(auxiliary),
          residency_(residency),
          transfers_(transfers),
          promises_(promises),
          uses_(uses),
          batches_(batches),
          peers_(peers),
          swaps_(swaps),
          external_(external) {}

    // Releases the lease. Returns false if batches or transfers of peers in flight keep the blocks;
    // the lease then ends with the last of them. `used_in`: a step that certainly uses the blocks,
    // even if a batch has named the lease. Like retract(), throws LeaseError, changing nothing, if
    // the lease is already released.
    // `label`: see EvictionOrder::on_label(); empty for none.
    bool release(Lease& lease, Step step, Step used_in, std::string_view label);
    // Ends a released lease that no batch and no transfer of a peer uses any more.
    void end(Lease& lease, Step step);
    // Returns the lease to the state after its match. Returns the keeper of its blocks, or 0.
    LeaseId retract(Lease& lease, Step step);
    // Returns the keeper, or 0. Throws LeaseError, changing nothing.
    LeaseId truncate(Lease& lease, std::int64_t num_tokens, Step step);

  private:
    void check_truncate(const Lease& lease, std::int64_t num_tokens) const;
    void give_back(Lease& lease, Step step, LeaseState next);
    void leave_onloads(Lease& lease, Step step);
    Lease& open_keeper(const Lease& lease, Step step);
    LeaseId set_aside(Lease& lease, Step step);
    LeaseId cut_table(Lease& lease, std::size_t blocks, Step step);
    void await_end_of_use(Lease& keeper);

    const CoreConfig& config_;
    DevicePool& device_;
    LeaseTable& leases_;
    Index& index_;
    RecurrentState& state_;
    SlidingWindows& windows_;
    AuxiliaryGroups& auxiliary_;
    Residency& residency_;
    TransferLedger& transfers_;
    Promises& promises_;
    Uses& uses_;
    Batches& batches_;
    PeerTransfers& peers_;
    Swaps& swaps_;
    ExternalBlocks& external_;
};

}  // namespace aiokv
