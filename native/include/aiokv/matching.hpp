// The longest cached prefix of a prompt, and where a hit may end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/index.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Matching {
  public:
    Matching(const CoreConfig& config, const Index& index, const AuxiliaryGroups& auxiliary,
             const TransferLedger& transfers)
        : config_(config), index_(index), auxiliary_(auxiliary), transfers_(transfers) {}

    // Path, device_hit and host_hit: the longest cached prefix that leaves something to compute.
    void walk(Lease& lease) const;
    // walk(), if the index has changed since the last one.
    void refresh(Lease& lease) const {
        if (lease.version != index_.version()) walk(lease);
    }
    // The path that a grant takes: no more than `usable` blocks, and no onload that is not worth
    // it.
    void choose_path(Lease& lease, std::size_t usable) const;
    // Shortens the path; a later grant walks again.
    static void shorten(Lease& lease, std::size_t blocks);

    // Where the cached blocks of a prompt end, also where no hit may end, and the block behind the
    // last one that a hit may have.
    struct Frontier {
        NodeId end;
        std::size_t first;  // block behind `end`
        std::size_t limit;
    };
    Frontier frontier(Lease& lease) const;
    // The nodes of the cached blocks from `first` to `end` of the lease's prompt. Requires that
    // end is at most Frontier::first.
    std::vector<NodeId> nodes(Lease& lease, std::size_t first, std::size_t end) const;

    // The longest run of full blocks behind what is cached that one granted lease will compute. A
    // hit may end before that: where its owner has not saved the state yet, or inside an item.
    Pending pending(Lease& lease, const Promises& promises) const;

    // `blocks`, or fewer: where a hit may end, for items and auxiliary pools.
    std::size_t reachable(const Lease& lease, std::size_t blocks) const;
    // Like reachable(), but only where the auxiliary ids of the hit can be onloaded now.
    std::size_t onloadable(const Lease& lease, std::size_t blocks) const;
    // `blocks`, or fewer, so that they do not end inside an item: an encoder computes whole items.
    // `blocks` with CoreConfig::splits_items.
    std::size_t before_cut_item(const Lease& lease, std::size_t blocks) const;
    // Blocks of the path before the first one whose transfer is being cancelled.
    std::size_t joinable(const Lease& lease) const;
    // Blocks of the path that can be granted with `writable` device ids for onloads.
    std::size_t writable_path(const Lease& lease, std::size_t resident, std::size_t writable) const;

    // Where recurrent state is worth saving, in positions: where this prompt leaves what is cached,
    // since others may part there too, and at the last boundary that an equal prompt can hit.
    std::vector<std::uint32_t> snapshot_points(const Lease& lease) const;

  private:
    std::size_t hit_limit(const Lease& lease) const;
    std::size_t boundary_before(std::size_t length) const;
    std::size_t resident_prefix(const Lease& lease) const;

    const CoreConfig& config_;
    const Index& index_;
    const AuxiliaryGroups& auxiliary_;
    const TransferLedger& transfers_;
};

}  // namespace aiokv
