// Leases that hold a prefix until another lease uses it, such as those of a prefetch.
//
// The last node of the held hit has a flag, so a grant looks up only flagged nodes of its own path.
#pragma once

#include <unordered_map>
#include <vector>

#include "aiokv/lease_table.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Uses {
  public:
    Uses(PrefixTree& tree, LeaseTable& leases) : tree_(tree), leases_(leases) {}

    // Lets take() return the lease after a computing lease was granted a hit of its whole path.
    void await(Lease& lease);
    std::vector<LeaseId> take();
    // Call when `user` was granted its path.
    void note(const Lease& user);
    void forget(Lease& lease);

    void check(Report& report) const;

  private:
    PrefixTree& tree_;
    LeaseTable& leases_;
    std::unordered_multimap<NodeId, LeaseId> awaited_;  // nodes with kAwaitsUse -> leases
    std::vector<LeaseId> used_;                         // leases that take() will return
};

}  // namespace aiokv
