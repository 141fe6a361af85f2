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
#include <string_view>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/eviction_order.hpp"
#include "aiokv/look_ahead.hpp"
#include "aiokv/preferred_queue.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Report;

class EvictableBlocks final : private SplitListener {
  public:
    EvictableBlocks(const CoreConfig& config, PrefixTree& tree);
    EvictableBlocks(const EvictableBlocks&) = delete;

    // -- runs without refs, in the queue of their fastest tier
    // Queues a run as used now. Skips blocks that are being loaded: the end of their transfer
    // queues them.
    void enqueue(RunId run);
    void dequeue(RunId run) {
        end_touch();
        take_out(run);
    }
    // Takes a path out of the queues, run by run: call begin_use(), and then use() for each run
    // without refs.
    void begin_use(std::span<const NodeId> path) {
        if (!path.empty() && path.back() == touched_) touched_ = kNone;  // which moves it anyway
        end_touch();
    }
    void use(RunId run) {
        Run& r = tree_.runs()[run];
        const bool is_demoted = r.level == kDemotedLevel;
        take_out(run);
        if (is_demoted) r.level = kNormalLevel;  // a use ends a demotion
    }
    // Queues one block alone. Splits the run of the block.
    void enqueue_block(NodeId node) { enqueue(tree_.isolate(node)); }
    void dequeue_block(NodeId node) {
        if (is_listed(node)) dequeue(tree_.isolate(node));
    }
    // Returns true if the block is in a queue or deferred.
    bool is_listed(NodeId node) const { return tree_.run(node).has(kQueued | kParked); }
    void defer(RunId run);
    // Returns true if a block with a device copy is deferred.
    bool is_deferred(NodeId node) const {
        return deferred_device_ > 0 && tree_.run(node).has(kParked);
    }
    // Puts a deferred block back to the front of its queue, if it can be evicted now. Those above
    // it may follow, which then wait in the queue behind it.
    void requeue_if_free(NodeId node);
    // Marks a path, which begins at the root, as used now. Its deepest block counts as the least
    // recently used.
    void touch(std::span<const NodeId> path);
    // Call before a block loses its parent. The blocks of a path that was marked are moved in their
    // queues now, if they have not been yet.
    void end_touch() {
        if (touched_ != kNone) move_touched();
    }
    // Call before the first swapped lease holds the node, and after the last one has released it.
    void begin_hold(NodeId node);
    void end_hold(NodeId node);
    // Removes the last `count` blocks of a queued run from the tier and the tree. Nothing may hold
    // them, and they must have no children.
    void trim(RunId run, std::uint32_t count);

    // Removes all blocks, without access to their runs.
    void clear();

    NodeId device_front() {
        end_touch();
        return tree_.last_of(device_.front());
    }
    NodeId after_on_device(NodeId node) const { return next_victim(tree_, device_, node); }
    NodeId host_front() {
        end_touch();
        return tree_.last_of(host_.front());
    }
    NodeId after_on_host(NodeId node) const { return next_victim(tree_, host_, node); }
    std::uint32_t evictable_device() const { return queued_device_ + deferred_device_; }
    std::uint32_t queued_host() const { return queued_host_; }
    // Number of blocks that only the host has and no swapped lease holds, including deferred ones.
    std::uint32_t idle_host() const { return idle_host_; }

    // -- what decides the order
    // Call when a lease is granted. `seed`: seed of its context.
    void on_grant(Lease& lease, std::uint64_t seed) {
        end_touch();
        if (order_->on_grant(lease, seed)) ahead_.restart();
        classify(lease, 0, lease.path);
    }
    // Call when a lease is released with a label, before it drops its refs.
    void on_label(Lease& lease, std::uint64_t seed, std::string_view label) {
        end_touch();
        order_->on_label(lease, seed, label);
        if (lease.has_blocks()) classify(lease, 0, lease.path);
    }
    // Gives the blocks of a lease from `first` on the classes of its prompt. None of them may be
    // queued.
    void classify(const Lease& lease, std::size_t first, std::span<const NodeId> nodes);
    void on_device_resized(std::uint32_t blocks) {
        end_touch();
        order_->on_device_resized(blocks);
        device_.resize(blocks);
        for (std::uint32_t share = 1; share <= device_.num_shares(); ++share) {
            fit_share(device_, share);
        }
    }

    // -- what is kept, and for which salt; see PreferredQueue
    // Raises the blocks of a path to the level of a priority and an end. Those of a higher level
    // keep theirs.
    void retain(std::span<const NodeId> path, std::uint32_t priority, std::uint64_t end);
    void demote(std::span<const NodeId> path);
    void demote(RunId run) { set_level(run, kDemotedLevel); }
    // Ends the retentions that end at `now` or before.
    void end_retentions(std::uint64_t now);
    // Makes room for a salt, whose own share is used up before those of others; 0 for no salt.
    void serve(std::uint32_t share) {
        if (device_.serve(share) != share && device_.has_parts()) ahead_.restart();
    }
    // Does the same for a forecast, after which the former share is served again.
    std::uint32_t serve_forecast(std::uint32_t share) {
        end_touch();
        return device_.serve(share);
    }
    // Returns the rank of a block of the device queue, or of one that is deferred from it.
    PreferredQueue::Rank device_rank(NodeId node) const {
        return device_.rank_of(tree_.run_of(node));
    }
    // Returns the rank that a block of the device has after its next use.
    PreferredQueue::Rank used_rank(NodeId node) const {
        return device_.used_rank(tree_.run_of(node));
    }
    // Returns the rank that a block has without a reservation.
    PreferredQueue::Rank level_rank(NodeId node) const {
        return levels_.rank(tree_.run(node).level);
    }
    // Returns the first reserved device block of a salt that is not deferred, or kNone.
    NodeId first_reserved(std::uint32_t share) const {
        return tree_.last_of(device_.first_reserved(share));
    }
    // Returns the excess of a salt's share of the device after a change of its reserved blocks.
    std::uint32_t excess_of(std::uint32_t share, std::int64_t change) const {
        return device_.excess_of(share, change);
    }
    template <class Visit>
    void for_each_retained(Visit visit) {
        device_.for_each_retained(visit);
        host_.for_each_retained(visit);
    }

    // Deferred device blocks that have no host copy, in the order in which they were deferred. They
    // are evicted right after their children.
    const std::vector<NodeId>& unsaved_parked() {
        trim_unsaved_parked();
        return unsaved_parked_;
    }
    // Calls `visit` with the same blocks, with some of them twice. Unlike unsaved_parked(), changes
    // nothing.
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
    bool is_on_device(RunId id) const {
        const Run& run = tree_.runs()[id];
        return run.has(kOnDevice) || tree_[run.first].has(kDeviceValid);
    }
    PreferredQueue& queue_of(RunId run) { return is_on_device(run) ? device_ : host_; }
    std::uint32_t& queued_of(RunId run) {
        return is_on_device(run) ? queued_device_ : queued_host_;
    }
    void move_touched();
    void take_out(RunId run);
    void push(RunId run, bool joins = true);
    void append(PreferredQueue& queue, RunId run, bool joins = true);
    void join_below(PreferredQueue& queue, RunId run);
    void set_level(RunId run, Level level);
    void fit_share(PreferredQueue& queue, std::uint32_t share);
    void note_place(const PreferredQueue& queue, RunId run);
    std::uint32_t count_idle_host(RunId run) const;
    bool is_parked_unsaved(NodeId node) const;
    void trim_unsaved_parked();
    std::size_t most_unsaved_parked() const { return 2 * std::size_t{deferred_device_} + 64; }

    PrefixTree& tree_;
    const std::unique_ptr<EvictionOrder> order_;
    Levels levels_;
    PreferredQueue device_;  // runs without refs that are on the device, the next victim first
    PreferredQueue host_;    // runs without refs that only the host has
    LookAhead ahead_;
    // Last block of a path that was used last, and that is moved in its queue before anything else
    // reads or changes a queue: a grant, which mostly comes first, takes the path out instead.
    NodeId touched_ = kNone;
    const bool has_host_;
    const bool has_classes_;
    std::uint32_t queued_device_ = 0;  // blocks
    std::uint32_t queued_host_ = 0;
    std::vector<NodeId> unsaved_parked_;  // may also have blocks that were saved or queued again
    std::uint32_t deferred_device_ = 0;
    std::uint32_t idle_host_ = 0;
};

// Returns true if evicting the device copy needs no further copy to the host.
inline bool is_saved(const Node& n) {
    return n.has(kHostValid | kHostLoading | kBackupFailed);
}

}  // namespace aiokv
