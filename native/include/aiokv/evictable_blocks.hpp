// The blocks without refs of each tier, which may be evicted.
//
// A queue of the policy's EvictionOrder holds the nodes without refs, the next victim first. A node
// that reaches the front while a transfer pins it, or while a child still needs it, is deferred: it
// leaves the queue. It returns to the front as soon as it can be evicted, because all nodes left in
// the queue rank behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/eviction_order.hpp"
#include "aiokv/look_ahead.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Report;

class EvictableBlocks {
  public:
    EvictableBlocks(const CoreConfig& config, PrefixTree& tree);

    // -- nodes without refs, in the queue of their fastest tier
    void enqueue(NodeId node);  // used now
    void dequeue(NodeId node);
    // The longest start of a path whose nodes only have to leave the device queue; returns its
    // length. One call of the policy for all of them.
    std::size_t dequeue_run(std::span<const NodeId> path);
    // Nodes of a path with device copies, none of them queued, used now.
    void enqueue_run(std::span<const NodeId> path);
    void defer(NodeId node);
    // Puts a deferred node back to the front of its queue, if it can be evicted now.
    void requeue_if_free(NodeId node);
    // Marks a path as used now; its deepest block counts as the least recently used.
    void touch(std::span<const NodeId> path);
    // The first swapped lease is about to hold the node, or the last one has released it.
    void begin_hold(NodeId node);
    void end_hold(NodeId node);

    NodeId device_front() { return device_.front(); }
    NodeId after_on_device(NodeId node) const { return device_.after(node); }
    NodeId host_front() { return host_.front(); }
    NodeId after_on_host(NodeId node) const { return host_.after(node); }
    std::uint32_t evictable_device() const { return device_.size() + deferred_device_; }
    std::uint32_t queued_host() const { return host_.size(); }
    // Blocks on the host only that no swapped lease holds, deferred ones too.
    std::uint32_t idle_host() const { return idle_host_; }

    // -- what decides the order
    // A lease is granted; `seed` is that of its context.
    void on_grant(Lease& lease, std::uint64_t seed) {
        if (order_->on_grant(lease, seed)) ahead_.restart();
    }
    // A lease has computed the block.
    void on_computed(const Lease& lease, std::uint32_t block, NodeId node) {
        tree_[node].reuse_class = lease.class_of(block);
    }
    void on_device_resized(std::uint32_t blocks) { order_->on_device_resized(blocks); }

    // Deferred device blocks that are not saved: they are evicted right after their children.
    // In the order in which they were deferred.
    const std::vector<NodeId>& unsaved_parked() {
        trim_unsaved_parked();
        return unsaved_parked_;
    }
    // Calls `visit` with the same blocks, some of them twice; changes nothing.
    template <class Visit>
    void visit_unsaved_parked(Visit visit) const {
        for (const NodeId node : unsaved_parked_) {
            if (is_parked_unsaved(node)) visit(node);
        }
    }
    LookAhead& ahead() { return ahead_; }
    const LookAhead& ahead() const { return ahead_; }

    std::size_t bytes() const;
    void check(Report& report) const;

  private:
    TierQueue& queue_of(NodeId node);
    // On the device, neither deferred nor looked at by the look-ahead.
    bool is_plainly_queued(NodeId node) const;
    void count_idle_host(const Node& n, int change);
    bool is_parked_unsaved(NodeId node) const;
    void trim_unsaved_parked();
    std::size_t most_unsaved_parked() const { return 2 * std::size_t{deferred_device_} + 64; }

    PrefixTree& tree_;
    const std::unique_ptr<EvictionOrder> order_;
    TierQueue& device_;  // ref 0 and device VALID, the next victim first
    TierQueue& host_;    // ref 0 and host VALID only
    LookAhead ahead_;
    std::vector<NodeId> unsaved_parked_;  // some are saved by now, or queued again
    std::uint32_t deferred_device_ = 0;
    std::uint32_t idle_host_ = 0;
};

// Returns true if the block can leave the device without another copy.
inline bool is_saved(const Node& n) {
    return n.has(kHostValid | kHostLoading | kBackupFailed);
}

}  // namespace aiokv
