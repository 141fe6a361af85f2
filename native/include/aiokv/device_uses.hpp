// The device ids of a server that transfers in flight read or write, and for which leases.
//
// The server must not free or reuse an id before the leases that named it are idle. A lease keeps
// its uses when it gives the ids up, and when it is released.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/block_pool.hpp"
#include "aiokv/lease.hpp"

namespace aiokv {

class DeviceUses {
  public:
    // Call when a transfer, or a save that waits for one, begins to use ids that the lease has
    // named. No id is negative.
    void begin_read(std::span<const BlockId> ids, LeaseId lease) { begin(reads_, ids, lease); }
    void end_read(std::span<const BlockId> ids, LeaseId lease) { end(reads_, ids, lease); }
    void begin_write(std::span<const BlockId> ids, LeaseId lease) { begin(writes_, ids, lease); }
    void end_write(std::span<const BlockId> ids, LeaseId lease) { end(writes_, ids, lease); }

    bool is_read(BlockId id) const { return reads_.has(id); }
    bool is_written(BlockId id) const { return writes_.has(id); }
    bool has_writes() const { return writes_.total > 0; }
    bool is_idle(LeaseId lease) const { return !leases_.contains(lease); }
    // Returns the leases whose last use has ended since the last call. Some may have new uses.
    std::vector<LeaseId> take_idle() { return std::exchange(idle_, {}); }

  private:
    struct Counts {
        std::vector<std::uint32_t> by_id;  // as long as the largest id has required
        std::size_t total = 0;

        bool has(BlockId id) const {
            const auto index = static_cast<std::size_t>(id);
            return index < by_id.size() && by_id[index] > 0;
        }
    };

    void begin(Counts& counts, std::span<const BlockId> ids, LeaseId lease) {
        if (ids.empty()) return;
        const auto last = static_cast<std::size_t>(*std::max_element(ids.begin(), ids.end()));
        if (last >= counts.by_id.size()) counts.by_id.resize(last + 1);
        for (const BlockId id : ids) ++counts.by_id[static_cast<std::size_t>(id)];
        counts.total += ids.size();
        leases_[lease] += ids.size();
    }
    void end(Counts& counts, std::span<const BlockId> ids, LeaseId lease) {
        if (ids.empty()) return;
        for (const BlockId id : ids) --counts.by_id[static_cast<std::size_t>(id)];
        counts.total -= ids.size();
        const auto found = leases_.find(lease);
        if ((found->second -= ids.size()) > 0) return;
        leases_.erase(found);
        idle_.push_back(lease);
    }

    Counts reads_;
    Counts writes_;
    std::unordered_map<LeaseId, std::size_t> leases_;
    std::vector<LeaseId> idle_;
};

}  // namespace aiokv
