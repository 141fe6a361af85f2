// Device blocks of a server: leases name their ids, and the index has host copies only.
//
// The server decides which of its device blocks holds what, and has a prefix cache of its own. A
// grant takes refs on the host blocks of a hit, and no device block. assign() names the ids of a
// lease: the first call begins the onload of the hit into them. The ids belong to no pool, and
// leases may share them; DeviceUses knows which of them transfers read or write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/device_uses.hpp"
#include "aiokv/external_groups.hpp"
#include "aiokv/external_saves.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// The end of an onload, as the lease sees it.
struct ExternalEnd {
    LeaseId lease = 0;  // 0: the lease no longer waits for the onload
    bool failed = false;
    std::uint32_t good_blocks = 0;  // leading blocks of the lease that are valid
    // Other leases that have named ids whose bytes have not arrived, with their good blocks.
    std::vector<std::pair<LeaseId, std::uint32_t>> sharing;
};

class ExternalBlocks {
  public:
    ExternalBlocks(const CoreConfig& config, const DevicePool& device, RunPool& host,
                   LeaseTable& leases, Index& index, Residency& residency,
                   const StoredBlocks& stored, StoreSaver& store_saver, TransferLedger& transfers,
                   Promises& promises, DeviceUses& uses, ExternalGroups& groups)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          residency_(residency),
          transfers_(transfers),
          uses_(uses),
          groups_(groups),
          stored_(stored),
          saves_(config, device, host, leases, index, residency, store_saver, transfers, promises,
                 uses, groups) {}

    ExternalBlocks(const ExternalBlocks&) = delete;
    ExternalBlocks& operator=(const ExternalBlocks&) = delete;

    bool exist() const { return config_.external_device; }

    // Throws UsageError, changing nothing, in this mode: the call needs a device pool of the
    // engine.
    void refuse(const char* call, const char* hint) const {
        if (exist()) refuse_always(call, hint);
    }

    // Appends ids to the table of a granted lease. The first call begins the onload of the cached
    // positions from `computed_tokens` on, which the server's own cache does not have. `group_ids`:
    // one row of as many ids per group besides attention, where kNoBlock is none; or empty. Throws
    // LeaseError or UsageError, changing nothing.
    void assign(Lease& lease, std::span<const BlockId> ids, std::int64_t computed_tokens,
                std::span<const BlockId> group_ids);
    // Drops the refs and the ids of the lease.
    void give_up(Lease& lease);
    // Drops the refs of a lease whose request has ended, while the server's cache keeps its ids:
    // its host copies are evicted first; see Residency::evict_first(). This waits for saves of its
    // blocks to host memory and to stores: a block that is evicted cannot be saved. The next commit
    // takes refs again.
    void retire(Lease& lease);
    // Call when saves to host memory or to the stores may have ended.
    void end_retiring();
    // Drops the refs of a retired lease at once, whether or not its saves have ended.
    void drop_retiring(Lease& lease);
    // Returns false while an onload writes ids of the lease, and if it publishes no blocks.
    bool can_retire(const Lease& lease) const;
    // Call when the lease no longer waits for the onload. An onload without a waiting lease is
    // abandoned: it is worth cancelling.
    void leave_onload(TransferId id, LeaseId lease);
    void replace_lease(TransferId id, LeaseId from, LeaseId to);
    std::vector<TransferId> take_abandoned();

    // Returns true for an onload or a save in flight.
    bool has(TransferId id) const { return onloads_.contains(id) || saves_.has(id); }
    const Transfer& get(TransferId id) const;
    // Ends a transfer whose first `good` blocks have arrived. `cancelled`: the other blocks have
    // their old bytes.
    ExternalEnd complete(TransferId id, std::uint32_t good, bool cancelled);

    // Returns the newest unfinished step that transfers of the lease's ids wait for; 0 if there is
    // none.
    Step after_step(LeaseId lease) const;

    ExternalSaves& saves() { return saves_; }
    const ExternalSaves& saves() const { return saves_; }
    ExternalGroups& groups() { return groups_; }
    const ExternalGroups& groups() const { return groups_; }
    DeviceUses& uses() { return uses_; }
    const DeviceUses& uses() const { return uses_; }

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    struct Onload {
        Transfer transfer;
        LeaseId named_by = 0;           // lease that has named the ids
        std::uint32_t first_block = 0;  // index in the prompt
    };

    // A retired lease that waits for saves, and its blocks. Ignored if the lease was committed,
    // truncated or released since.
    struct Retiring {
        LeaseId lease;
        std::size_t blocks;
    };

    bool awaits_saves(const Lease& lease) const;
    [[noreturn]] static void refuse_always(const char* call, const char* hint);
    void check_ids(const Lease& lease, std::span<const BlockId> ids,
                   std::span<const BlockId> group_ids);
    void check_id(const Lease& lease, BlockId id, std::uint32_t device_blocks);
    void check_computed(const Lease& lease, std::size_t blocks, std::int64_t computed_tokens) const;
    void check_hit(const Lease& lease, std::size_t blocks, std::size_t first) const;
    void check_target(const Lease& lease, BlockId id) const;
    void begin_onload(Lease& lease, std::size_t first);
    std::vector<std::pair<LeaseId, std::uint32_t>> leases_with(std::vector<BlockId> ids,
                                                               LeaseId except) const;

    const CoreConfig& config_;
    const DevicePool& device_;
    LeaseTable& leases_;
    Index& index_;
    Residency& residency_;
    TransferLedger& transfers_;
    DeviceUses& uses_;
    ExternalGroups& groups_;
    const StoredBlocks& stored_;
    ExternalSaves saves_;
    std::unordered_map<TransferId, Onload> onloads_;
    std::vector<TransferId> abandoned_;
    std::deque<Retiring> retiring_;  // in the order of retire(), mostly that of the saves
    std::size_t retiring_blocks_ = 0;
    std::vector<std::uint32_t> seen_;  // by id: number of the last check_ids() that has found it
    std::uint32_t check_ = 0;
    std::uint64_t onloaded_ = 0;
    std::uint64_t failed_ = 0;
};

}  // namespace aiokv
