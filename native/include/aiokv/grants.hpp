// Granting blocks: allocate, its forecast, extend and fork.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/fetches.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/matching.hpp"
#include "aiokv/misses.hpp"
#include "aiokv/publication.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/saver.hpp"
#include "aiokv/store_saver.hpp"
#include "aiokv/swaps.hpp"
#include "aiokv/transfer_ledger.hpp"
#include "aiokv/uses.hpp"

namespace aiokv {

using Reserve = std::optional<std::uint32_t>;

class Grants {
  public:
    Grants(const CoreConfig& config, DevicePool& device, LeaseTable& leases, Index& index,
           RecurrentState& state, SlidingWindows& windows, AuxiliaryGroups& auxiliary,
           const Matching& matching, Residency& residency, Saver& saver, TransferLedger& transfers,
           Publication& publication, Uses& uses, Swaps& swaps, StoreSaver& store_saver,
           Fetches& fetches, Misses& misses)
        : config_(config),
          device_(device),
          leases_(leases),
          index_(index),
          state_(state),
          windows_(windows),
          auxiliary_(auxiliary),
          matching_(matching),
          residency_(residency),
          saver_(saver),
          transfers_(transfers),
          publication_(publication),
          uses_(uses),
          swaps_(swaps),
          store_saver_(store_saver),
          fetches_(fetches),
          misses_(misses) {}

    // Throws the error of allocate() if the request can never be granted. `reserve`: number of free
    // or evictable blocks that the grant leaves to extend(); default: as configured.
    void check_request(const Lease& lease, std::int64_t num_tokens, Reserve reserve) const;
    // Returns kNone, and takes no block, if there is not enough room now.
    Grant allocate(Lease& lease, std::int64_t num_tokens, Reserve reserve);
    // Adds the cached blocks of the tokens behind those of a granted lease that computes nothing.
    // A prompt can so be granted in parts, between which other calls may evict what the lease does
    // not have yet. Takes full blocks of `more` up to the first one that is not cached. Returns
    // kNone, and changes nothing, if that is the first one, if there is not enough room, or if a
    // part before was dropped or has fewer blocks than its tokens. Throws LeaseError if the lease
    // computes, has items, or if there are other groups of blocks.
    Grant prolong(Lease& lease, Tokens more);
    // Returns true if allocate() would grant now. Evicts nothing. `saves`: after a refused grant,
    // the caller will call take_write_backs() and, if there is nothing to save, try once more.
    bool can_allocate(Lease& lease, std::int64_t num_tokens, bool saves, Reserve reserve);
    // Returns the number of device blocks, up to `limit`, that allocate() could take now for a
    // lease without cached blocks, ignoring the reserve. The result is `limit` exactly if
    // allocate() could take that many. `saves`: see can_allocate(). `salt`: of the lease.
    std::uint32_t allocatable_blocks(std::uint32_t limit, bool saves, std::string_view salt) {
        return takeable_blocks(limit, saves, salt, Residency::Unsaved::kKept);
    }
    // Returns the number of device blocks, up to `limit`, that extend() could take now. `salt`: of
    // the first lease.
    std::uint32_t extendable_blocks(std::uint32_t limit, bool saves, std::string_view salt) {
        return takeable_blocks(limit, saves, salt, unsaved_of_running());
    }
    // Gives all leases `num_tokens` more positions, or none of them. Returns false if there is no
    // room.
    bool extend(std::span<const LeaseId> ids, std::int64_t num_tokens);
    // Grows all leases to their numbers of positions, or none of them. Requires that extend()'s
    // checks hold.
    bool grow(std::span<const Growth> growths);
    // Throws LeaseError, which names `call`, if the lease cannot get `more` positions.
    void check_grow(const Lease& lease, const char* call, std::uint64_t more) const;
    // Opens a second lease on the same blocks. Blocks that are not indexed get new ids; the caller
    // copies the computed ones on the device, source to target, in `step`.
    Fork fork(Lease& parent, Step step);

    void add_to(CoreStatistics& statistics) const;

  private:
    std::uint32_t choose_path(Lease& lease, std::int64_t num_tokens);
    bool fit_writable(Lease& lease, std::uint32_t total_blocks, std::size_t resident);
    std::uint32_t reserve_for(std::uint32_t total_blocks, Reserve reserve) const;
    bool will_have_room(Residency::Forecast& forecast, std::uint32_t needed_blocks,
                        std::uint32_t wanted_blocks, bool saves) const;
    // extend() and fork() never wait. To succeed, they drop unsaved cached blocks, except with
    // write-back.
    Residency::Unsaved unsaved_of_running() const {
        return config_.write_policy == SavePolicy::kWriteBack ? Residency::Unsaved::kKept
                                                              : Residency::Unsaved::kDropped;
    }
    std::uint32_t takeable_blocks(std::uint32_t limit, bool saves, std::string_view salt,
                                  Residency::Unsaved unsaved);
    std::uint32_t pinned_blocks() const;
    bool make_room(const Lease& lease, std::uint32_t blocks) {
        return residency_.make_room(blocks, Residency::Unsaved::kKept, lease.id());
    }
    void take_blocks(Lease& lease, std::uint32_t total_blocks);
    std::uint32_t take_resident(Lease& lease, std::uint32_t first);
    void start_onload(Lease& lease, std::uint32_t first_host_block);

    const CoreConfig& config_;
    DevicePool& device_;
    LeaseTable& leases_;
    Index& index_;
    RecurrentState& state_;
    SlidingWindows& windows_;
    AuxiliaryGroups& auxiliary_;
    const Matching& matching_;
    Residency& residency_;
    Saver& saver_;
    TransferLedger& transfers_;
    Publication& publication_;
    Uses& uses_;
    Swaps& swaps_;
    StoreSaver& store_saver_;
    Fetches& fetches_;
    Misses& misses_;

    std::uint64_t grants_ = 0;
    std::uint64_t prompt_tokens_ = 0;
    std::uint64_t hit_device_tokens_ = 0;
    std::uint64_t hit_host_tokens_ = 0;
};

}  // namespace aiokv
