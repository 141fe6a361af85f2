// Changes of a whole tier: its blocks are forgotten, or it gets another size; and reset.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/saver.hpp"
#include "aiokv/store_saver.hpp"
#include "aiokv/swaps.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Tiers {
  public:
    Tiers(const CoreConfig& config, const DevicePool& device, LeaseTable& leases, Index& index,
          AuxiliaryGroups& auxiliary, Residency& residency, Saver& saver,
          const TransferLedger& transfers, Promises& promises, Swaps& swaps,
          StoreSaver& store_saver)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          auxiliary_(auxiliary),
          residency_(residency),
          saver_(saver),
          transfers_(transfers),
          promises_(promises),
          swaps_(swaps),
          store_saver_(store_saver) {}

    // Empties the device tier; blocks with a host copy stay on the host. Throws UsageError,
    // changing nothing, while a lease or a transfer needs a device block.
    void forget_device();
    // Empties the host tier; blocks on the device stay there. Throws UsageError, changing nothing,
    // while a lease, even a swapped one, or a transfer needs a host block.
    void forget_host();
    // Makes all blocks unmatchable. Leases keep their blocks, but those that they commit are not
    // indexed.
    void reset(bool new_weights);
    // Makes all blocks of some contexts unmatchable. Leases in them keep their blocks, but use and
    // publish no others from now on.
    void purge(const std::vector<bool>& contexts);
    // See Residency::resize_device(). Throws UsageError, changing nothing.
    void resize_device(std::int64_t blocks);

  private:
    // A resize that was refused because of a transfer or a step.
    struct ResizeTry {
        std::int64_t blocks = 0;
        std::uint64_t ended_transfers = 0;
        Step finished_step = 0;
        bool operator==(const ResizeTry&) const = default;
    };

    void require_idle(const char* tier, bool swapped_too) const;

    const CoreConfig& config_;
    const DevicePool& device_;
    LeaseTable& leases_;
    Index& index_;
    AuxiliaryGroups& auxiliary_;
    Residency& residency_;
    Saver& saver_;
    const TransferLedger& transfers_;
    Promises& promises_;
    Swaps& swaps_;
    StoreSaver& store_saver_;
    ResizeTry refused_resize_;
    std::size_t resize_from_ = 0;  // index of the lease that prevented the last attempt
};

}  // namespace aiokv
