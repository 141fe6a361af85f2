// The device ids of a server that transfers in flight read or write, and for which leases.
//
// The server must not free or reuse an id before the leases that named it are idle. A lease keeps
// its uses when it gives the ids up, and when it is released.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/block_pool.hpp"
#include "aiokv/lease.hpp"

namespace aiokv {

class DeviceUses {
  public:
    // Call when a transfer, or a save that waits for one, begins to use an id that the lease has
    // named.
    void begin_read(BlockId id, LeaseId lease) { begin(reads_, id, lease); }
    void end_read(BlockId id, LeaseId lease) { end(reads_, id, lease); }
    void begin_write(BlockId id, LeaseId lease) { begin(writes_, id, lease); }
    void end_write(BlockId id, LeaseId lease) { end(writes_, id, lease); }

    bool is_read(BlockId id) const { return reads_.contains(id); }
    bool is_written(BlockId id) const { return writes_.contains(id); }
    bool is_idle(LeaseId lease) const { return !leases_.contains(lease); }
    // Returns the leases whose last use has ended since the last call. Some may have new uses.
    std::vector<LeaseId> take_idle() { return std::exchange(idle_, {}); }

    const std::unordered_map<BlockId, std::uint32_t>& reads() const { return reads_; }
    const std::unordered_map<BlockId, std::uint32_t>& writes() const { return writes_; }
    const std::unordered_map<LeaseId, std::uint32_t>& leases() const { return leases_; }

  private:
    using Counts = std::unordered_map<BlockId, std::uint32_t>;

    void begin(Counts& counts, BlockId id, LeaseId lease) {
        ++counts[id];
        ++leases_[lease];
    }
    void end(Counts& counts, BlockId id, LeaseId lease) {
        if (const auto found = counts.find(id); --found->second == 0) counts.erase(found);
        const auto found = leases_.find(lease);
        if (--found->second > 0) return;
        leases_.erase(found);
        idle_.push_back(lease);
    }

    Counts reads_;
    Counts writes_;
    std::unordered_map<LeaseId, std::uint32_t> leases_;
    std::vector<LeaseId> idle_;
};

}  // namespace aiokv
