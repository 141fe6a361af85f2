// The blocks without refs of each tier, which may be evicted.
//
// A queue of the policy's EvictionOrder holds the runs without refs, the next victim first. A block
// that reaches the front while a transfer pins it, or while a child still needs it, is deferred: it
// leaves the queue. It returns to the front as soon as it can be evicted, because all blocks left
// in the queue rank behind it.
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

class EvictableBlocks final : private SplitListener {
  public:
    EvictableBlocks(const CoreConfig& config, PrefixTree& tree);
    EvictableBlocks(const EvictableBlocks&) = delete;

    // -- runs without refs, in the queue of their fastest tier
    // The run is used now. What is being loaded is queued by the end of its transfer.
    void enqueue(RunId run);
    void dequeue(RunId run);
    // Of one block alone; the run that it was in is split.
    void enqueue_block(NodeId node) { enqueue(tree_.isolate(node)); }
    void dequeue_block(NodeId node) {
        if (is_listed(node)) dequeue(tree_.isolate(node));
    }
    // In a queue, or deferred.
    bool is_listed(NodeId node) const { return tree_.run(node).has(kQueued | kParked); }
    void defer(RunId run);
    // A block with a device copy.
    bool is_deferred(NodeId node) const {
        return deferred_device_ > 0 && tree_.run(node).has(kParked);
    }
    // Puts a deferred block back to the front of its queue, if it can be evicted now.
    void requeue_if_free(NodeId node);
    // Marks a path as used now; its deepest block counts as the least recently used.
    void touch(std::span<const NodeId> path);
    // The first swapped lease is about to hold the node, or the last one has released it.
    void begin_hold(NodeId node);
    void end_hold(NodeId node);
    // The last `count` blocks of a queued run, which nothing holds and below which there are none,
    // leave tier and tree.
    void trim(RunId run, std::uint32_t count);

    NodeId device_front() { return tree_.last_of(device_.front()); }
    NodeId after_on_device(NodeId node) const { return next_victim(tree_, device_, node); }
    NodeId host_front() { return tree_.last_of(host_.front()); }
    NodeId after_on_host(NodeId node) const { return next_victim(tree_, host_, node); }
    std::uint32_t evictable_device() const { return queued_device_ + deferred_device_; }
    std::uint32_t queued_host() const { return queued_host_; }
    // Blocks on the host only that no swapped lease holds, deferred ones too.
    std::uint32_t idle_host() const { return idle_host_; }

    // -- what decides the order
    // A lease is granted; `seed` is that of its context.
    void on_grant(Lease& lease, std::uint64_t seed) {
        if (order_->on_grant(lease, seed)) ahead_.restart();
        classify(lease, 0, lease.path);
    }
    // The blocks of a lease from `first` on, none of which is queued, get the classes of its
    // prompt.
    void classify(const Lease& lease, std::size_t first, std::span<const NodeId> nodes);
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
    void on_split(RunId split, RunId made, bool made_is_above) override;
    bool is_on_device(RunId run) const { return tree_[tree_.runs()[run].first].has(kDeviceValid); }
    TierQueue& queue_of(RunId run) { return is_on_device(run) ? device_ : host_; }
    std::uint32_t& queued_of(RunId run) {
        return is_on_device(run) ? queued_device_ : queued_host_;
    }
    void push(RunId run);
    void append(TierQueue& queue, RunId run);
    std::uint32_t count_idle_host(RunId run) const;
    bool is_parked_unsaved(NodeId node) const;
    void trim_unsaved_parked();
    std::size_t most_unsaved_parked() const { return 2 * std::size_t{deferred_device_} + 64; }

    PrefixTree& tree_;
    const std::unique_ptr<EvictionOrder> order_;
    TierQueue& device_;  // ref 0 and device VALID, the next victim first
    TierQueue& host_;    // ref 0 and host VALID only
    LookAhead ahead_;
    std::uint32_t queued_device_ = 0;  // blocks
    std::uint32_t queued_host_ = 0;
    std::vector<NodeId> unsaved_parked_;  // some are saved by now, or queued again
    std::uint32_t deferred_device_ = 0;
    std::uint32_t idle_host_ = 0;
};

// Returns true if the block can leave the device without another copy.
inline bool is_saved(const Node& n) {
    return n.has(kHostValid | kHostLoading | kBackupFailed);
}

}  // namespace aiokv
