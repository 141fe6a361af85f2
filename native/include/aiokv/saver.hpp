// When blocks get their host copy: at commit, at the n-th use, or before eviction (write-back).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// Blocks of a lease behind those of its path, which are copied with these.
struct Tail {
    LeaseId owner = 0;
    std::span<const BlockId> device = {};
    std::span<const BlockId> host = {};
};

class Saver {
  public:
    // Blocks of one backup: to begin it and to submit its copy takes about 0.3 ms.
    static constexpr std::size_t kMostBackups = 8192;

    Saver(const CoreConfig& config, PrefixTree& tree, const DevicePool& device, RunPool& host,
          Residency& residency, TransferLedger& transfers)
        : config_(config),
          tree_(tree),
          device_(device),
          host_(host),
          residency_(residency),
          transfers_(transfers) {}

    // Another lease uses these blocks; the lease that computed a block is its first use.
    void count_uses(std::span<const NodeId> nodes) {
        for (const NodeId node : nodes) count_use(node);
    }
    void count_use(NodeId node) {
        Node& n = tree_[node];
        n.count_use();
        n.clear(kBackupFailed);  // a used block gets another chance
        if (config_.copies_after(n.uses)) queue(node);
    }

    // One transfer of queued blocks, oldest first, at most kMostBackups; 0: there is nothing to
    // copy, and the queue is empty. Blocks for which the host has no room are skipped: they are
    // tried again when they come near eviction.
    TransferId take_backups();
    // take_backups() has left blocks to its next call.
    bool has_queued() const { return !queue_.empty(); }
    // One transfer of the blocks that will be evicted next, oldest first, until `wanted_blocks` (or
    // the low watermark) are free, clean or being saved; 0: there is nothing to copy. They can be
    // matched on the device meanwhile. When no request waits, the walk continues where the last one
    // ended.
    TransferId take_write_backs(std::uint32_t wanted_blocks);
    bool wants_backups() const { return !queue_.empty() || wants_write_backs(); }
    bool wants_write_backs() const;
    // The last attempt to make room stopped at a block that take_write_backs() has not looked at,
    // and no save is in flight whose end might help.
    bool must_look_further() const {
        return residency_.stopped_at_unsaved() && !transfers_.is_saving();
    }
    // Saves the nodes, for which the host has free blocks, and the tail of a lease that is swapped,
    // whose host ids the caller has taken. Returns 0 when there is nothing to copy.
    TransferId start_offload(std::vector<NodeId> nodes, const Tail& tail = {});
    void forget_queue() { queue_.clear(); }

    void add_to(CoreStatistics& statistics) const { statistics.skipped_backups = skipped_; }
    void check(Report& report) const;

  private:
    void queue(NodeId node);
    std::vector<NodeId> take_queued(std::size_t entries);

    const CoreConfig& config_;
    PrefixTree& tree_;
    const DevicePool& device_;
    RunPool& host_;
    Residency& residency_;
    TransferLedger& transfers_;
    std::vector<NodeId> queue_;  // nodes with kBackupQueued; stale entries lack the flag
    std::uint64_t skipped_ = 0;
};

}  // namespace aiokv
