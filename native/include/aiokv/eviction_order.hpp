// The interface of an eviction policy: in which order do blocks without refs leave the tiers?
//
// A policy is a file of its own in src/index, and a row of the table in eviction_policies.cpp.
// EvictableBlocks decides which nodes are queued; a policy decides only about their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "aiokv/prefix_tree.hpp"

namespace aiokv {

struct CoreConfig;
struct Lease;

// The queued runs of one tier in eviction order. Within a run, the last block is evicted first.
class TierQueue {
  public:
    virtual ~TierQueue() = default;
    // Returns the run of the next victim, or kNoRun.
    virtual RunId front() = 0;
    // Returns the run that is evicted after `run`, or kNoRun. Used to look ahead.
    virtual RunId after(RunId run) const = 0;
    // Returns a run that is certainly evicted right before `run`, whatever the policy learns until
    // then; or kNoRun, after which looking ahead starts again at the front.
    virtual RunId before(RunId run) const = 0;
    virtual void push_back(RunId run) = 0;   // used now
    virtual void push_front(RunId run) = 0;  // a deferred victim returns
    // Call when a part of a queued run has become a run of its own.
    virtual void insert_before(RunId part, RunId run) = 0;
    virtual void insert_after(RunId part, RunId run) = 0;
    virtual void remove(RunId run) = 0;
    // Removes all runs, without access to them.
    virtual void clear() = 0;
};

// Returns the block that is evicted after `node`, or kNone.
inline NodeId next_victim(const PrefixTree& tree, const TierQueue& queue, NodeId node) {
    const RunId run = tree.run_of(node);
    return tree.runs()[run].first < node ? node - 1 : tree.last_of(queue.after(run));
}

class EvictionOrder {
  public:
    virtual ~EvictionOrder() = default;
    virtual TierQueue& device() = 0;  // nodes with a device copy
    virtual TierQueue& host() = 0;    // nodes with a host copy only
    virtual std::size_t bytes() const = 0;

    // -- events from which a policy may learn
    // Call when a lease is granted, after its hit blocks have left the queues. `seed`: seed of its
    // context. May set Lease::classes, which gives the blocks that the lease hits or computes their
    // classes. Returns true if the order of the device nodes has changed.
    virtual bool on_grant(Lease& /*lease*/, std::uint64_t /*seed*/) { return false; }
    // Call when a lease is released with a label, while it has its refs. May change Lease::classes.
    virtual void on_label(Lease& /*lease*/, std::uint64_t /*seed*/, std::string_view /*label*/) {}
    virtual void on_device_resized(std::uint32_t /*blocks*/) {}
    // Returns true if on_grant() sets Lease::classes.
    virtual bool has_classes() const { return false; }
};

// The names of all policies.
std::span<const std::string_view> eviction_policies();
// Returns the order of the policy `config.eviction`. Throws ConfigError for an unknown name.
std::unique_ptr<EvictionOrder> make_eviction_order(const CoreConfig& config, PrefixTree& tree);

}  // namespace aiokv
