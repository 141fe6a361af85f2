// A block group besides attention: its ids on the device, and their copies in the other tiers.
//
// Groups differ in their retention and in how leases get their ids: a window keeps the last blocks
// (SlidingWindows); recurrent state, the last one (RecurrentState); with device blocks of a server,
// the pool of the device is empty (ExternalGroups).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/group_pool.hpp"
#include "aiokv/host_copies.hpp"
#include "aiokv/index.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class Report;

class BlockGroup {
  public:
    // With `host_blocks` 0, the ids stay on the device.
    BlockGroup(const CoreConfig& config, GroupId number, Index& index, TransferLedger& transfers,
               GroupPool device, std::uint32_t host_blocks);

    BlockGroup(const BlockGroup&) = delete;
    BlockGroup& operator=(const BlockGroup&) = delete;

    GroupId number() const { return number_; }
    const GroupPool* host_pool() const { return host ? &host->pool() : nullptr; }

    // -- hits and nodes of the index
    // Returns true if a hit may end behind the first `blocks` of the path.
    bool covers(std::span<const NodeId> path, std::size_t blocks) const {
        return pool.covers(index_.tree(), path, blocks, host_pool());
    }
    void touch_hit(std::span<const NodeId> path);
    void forget(NodeId node);
    void forget_host() {
        if (host) host->pool().forget_all();
    }

    // -- ids for leases
    // Takes an id. Evicts an idle one when none is free; see GroupPool.
    BlockId take();
    BlockId take_writable();
    // Attaches the caller's id, in which the block was computed, to the node.
    void attach(NodeId node, BlockId id);
    // Call when a lease hits the node and uses its device id.
    void note_hit(NodeId node) {
        if (host) host->note_hit(node);
    }
    void note_use(BlockId id) {
        if (host) host->note_use(id);
    }

    AuxiliaryStore* store() { return host ? host->stores() : nullptr; }  // null: not connected

    GroupStatistics statistics() const;
    // `readers`, `host_readers`: number of readers per device id and per host id, without those
    // that HostCopies counts. `ids`: owners that are not nodes. `owned`: see HostCopies.
    void check(Report& report, Ownership ids, std::vector<std::uint32_t> readers,
               std::vector<std::uint32_t> host_readers, std::span<const BlockId> owned = {}) const;

    GroupPool pool;                  // on the device
    std::optional<HostCopies> host;  // none: the blocks stay on the device
    std::uint64_t cloned = 0;        // copies on the device with which leases began
    std::uint64_t onloaded = 0;      // copies that came from host memory

  private:
    BlockId taken(BlockId id, bool evicts);

    GroupId number_;
    std::uint32_t device_blocks_;  // those of a server are not in the pool
    Index& index_;
    std::uint64_t evicted_ = 0;  // device copies
};

}  // namespace aiokv
