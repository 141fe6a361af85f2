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

// Blocks of a lease that are behind its path and copied together with it.
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

    // Call when another lease uses blocks, whose slots are consecutive from `first` on. The lease
    // that computed them counts as their first use.
    void count_uses(NodeId first, std::size_t blocks) {
        const std::span<Node> nodes(&tree_[first], blocks);
        for (Node& n : nodes) {
            n.count_use();
            n.clear(kBackupFailed);  // a used block is tried again
        }
        for (std::size_t i = 0; config_.copies_after(kMaxUses) && i < blocks; ++i) {
            note_uses(first + static_cast<NodeId>(i), nodes[i].uses);
        }
    }
    // Call when the number of uses of a block has changed.
    void note_uses(NodeId node, std::uint32_t uses) {
        if (config_.copies_after(uses)) queue(node);
    }

    // Begins one transfer of queued blocks, oldest first, at most kMostBackups. Returns 0 if there
    // is nothing to copy; then the queue is empty. Skips blocks for which the host has no room:
    // they are tried again shortly before their eviction.
    TransferId take_backups();
    // Whether take_backups() has left blocks to its next call.
    bool has_queued() const { return !queue_.empty(); }
    // Queues the blocks that were computed ahead of the open step, if their step is closed now.
    void close_step();
    // Begins one transfer of the blocks that will be evicted next, oldest first, until
    // `wanted_blocks` (or the low watermark, if greater) are free, clean or being saved. Returns 0
    // if there is nothing to copy. The blocks can be matched on the device meanwhile. If no request
    // waits, the walk continues where the last one ended.
    TransferId take_write_backs(std::uint32_t wanted_blocks);
    bool wants_backups() const { return !queue_.empty() || wants_write_backs(); }
    bool wants_write_backs() const;
    // Returns true if the last attempt to make room stopped at a block that take_write_backs() has
    // not looked at, while no save in flight could help.
    bool must_look_further() const {
        return residency_.stopped_at_unsaved() && !transfers_.is_saving();
    }
    // Saves the nodes and the tail of a swapped lease. The host must have room for the nodes, and
    // the caller must have taken the host ids of the tail. Returns 0 if there is nothing to copy.
    TransferId start_offload(std::vector<NodeId> nodes, const Tail& tail = {});
    void forget_queue() {
        queue_.clear();
        ahead_.clear();
    }

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
    std::vector<NodeId> queue_;  // nodes; those without kBackupQueued are stale
    std::vector<NodeId> ahead_;  // nodes to queue when the steps that compute them are closed
    std::uint64_t skipped_ = 0;
};

}  // namespace aiokv
