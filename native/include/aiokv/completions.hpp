// The end of transfers: bytes that have arrived become visible; ids of the others are freed (I3,
// I4).
#pragma once

#include <cstdint>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/external_blocks.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/matching.hpp"
#include "aiokv/publication.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/store_saver.hpp"
#include "aiokv/swaps.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Completions {
  public:
    Completions(const CoreConfig& config, DevicePool& device, LeaseTable& leases, Index& index,
                RecurrentState& state, AuxiliaryGroups& auxiliary, const Matching& matching,
                Residency& residency, TransferLedger& transfers, Promises& promises,
                Publication& publication, Swaps& swaps, StoreSaver& store_saver,
                ExternalBlocks& external)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          state_(state),
          auxiliary_(auxiliary),
          matching_(matching),
          residency_(residency),
          transfers_(transfers),
          promises_(promises),
          publication_(publication),
          swaps_(swaps),
          store_saver_(store_saver),
          external_(external) {}

    // Blocks before `first_bad_block` are proven when the transfer failed.
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    // Call when the lease's recurrent state or a window no longer matches any position.
    void lose_sides(Lease& lease) { fail(lease, 0); }
    // Returns the first position to compute again after a failed onload, or -1 if none has failed.
    std::int64_t recompute_from(Lease& lease);

  private:
    void finish_external(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    void finish_move(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    void finish_tail(const Transfer& transfer, std::uint32_t good_blocks);
    void fail_leases(const Transfer& transfer, NodeId first_bad);
    void fail(Lease& lease, std::uint32_t good_blocks);
    void settle(Lease& lease, TransferId id);

    const CoreConfig& config_;
    DevicePool& device_;
    LeaseTable& leases_;
    Index& index_;
    RecurrentState& state_;
    AuxiliaryGroups& auxiliary_;
    const Matching& matching_;
    Residency& residency_;
    TransferLedger& transfers_;
    Promises& promises_;
    Publication& publication_;
    Swaps& swaps_;
    StoreSaver& store_saver_;
    ExternalBlocks& external_;
};

}  // namespace aiokv
