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

    // Sets path, device_hit and host_hit to the longest cached prefix that leaves something to
    // compute.
    void walk(Lease& lease) const { walk(lease, lease.tokens); }
    // Does the same for a prompt of which the lease has no copy.
    void walk(Lease& lease, Tokens prompt) const;
    // Calls walk() if the index has changed since the last walk.
    void refresh(Lease& lease) const {
        if (lease.version != index_.version()) walk(lease);
    }
    // Sets the path of a grant: at most `usable` blocks, without an onload that is not worth its
    // time.
    void choose_path(Lease& lease, std::size_t usable) const;
    // Shortens the path. A later grant walks again.
    static void shorten(Lease& lease, std::size_t blocks);

    // The end of the blocks that a hit may have.
    std::size_t hit_limit(const Lease& lease) const {
        return hit_limit(lease, lease.tokens.size());
    }

    // The end of the cached blocks of a prompt, even if no hit may end there, and the end of the
    // blocks that a hit may have.
    struct Frontier {
        NodeId end;
        std::size_t first;  // block behind `end`
        std::size_t limit;
    };
    Frontier frontier(Lease& lease) const;
    // Returns the nodes of the cached blocks from `first` to `end` of the lease's prompt. Requires
    // that `end` is at most Frontier::first.
    std::vector<NodeId> nodes(Lease& lease, std::size_t first, std::size_t end) const;

    // Returns the longest run of full blocks behind the cached ones that one granted lease will
    // compute. A later hit may have to end earlier: where the owner has not saved the state yet, or
    // at an item.
    Pending pending(Lease& lease, const Promises& promises) const;

    // Returns the largest number of blocks up to `blocks` behind which a hit may end, because of
    // items and auxiliary pools.
    std::size_t reachable(const Lease& lease, std::size_t blocks) const;
    // Does the same as reachable(), but accepts only ends where the hit's auxiliary ids can be
    // onloaded now.
    std::size_t onloadable(const Lease& lease, std::size_t blocks) const;
    // Returns `blocks` or, if these end inside an item, the blocks before that item, because an
    // encoder computes whole items. Returns `blocks` with CoreConfig::splits_items.
    std::size_t before_cut_item(const Lease& lease, std::size_t blocks) const;
    // Returns the number of blocks of the path before the first one whose transfer is being
    // cancelled.
    std::size_t joinable(const Lease& lease) const;
    // Returns the number of blocks of the path that can be granted with `writable` device ids for
    // onloads.
    std::size_t writable_path(const Lease& lease, std::size_t resident, std::size_t writable) const;

    // Returns the positions where recurrent state is worth saving: the end of the cached prefix,
    // because other prompts may diverge there, too, and the last boundary that an equal prompt can
    // hit.
    std::vector<std::uint32_t> snapshot_points(const Lease& lease) const;

    // Returns the number of leading blocks on the device, of which `first` are known to be there.
    std::size_t resident_prefix(const Lease& lease, std::size_t first = 0) const;

  private:
    std::size_t hit_limit(const Lease& lease, std::size_t length) const;
    std::size_t boundary_before(std::size_t length) const;

    const CoreConfig& config_;
    const Index& index_;
    const AuxiliaryGroups& auxiliary_;
    const TransferLedger& transfers_;
};

}  // namespace aiokv
