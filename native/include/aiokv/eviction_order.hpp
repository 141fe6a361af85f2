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

#include "aiokv/node.hpp"

namespace aiokv {

class PrefixTree;
struct CoreConfig;
struct Lease;

// The queued nodes of one tier, in the order in which they should be evicted.
class TierQueue {
  public:
    virtual ~TierQueue() = default;
    // The next victim, or kNone.
    virtual NodeId front() = 0;
    // The node whose turn is after `node`'s, or kNone; for looking ahead.
    virtual NodeId after(NodeId node) const = 0;
    // A node whose turn is before `node`'s, or kNone: looking ahead then starts at the front again.
    virtual NodeId before(NodeId node) const = 0;
    virtual std::uint32_t size() const = 0;
    // Nodes of one path, used now: the last one is the least recently used of them.
    virtual void push_back(std::span<const NodeId> path) = 0;
    virtual void push_front(NodeId node) = 0;  // was the next victim, but was blocked
    virtual void remove(std::span<const NodeId> path) = 0;
};

class EvictionOrder {
  public:
    virtual ~EvictionOrder() = default;
    virtual TierQueue& device() = 0;  // nodes with a device copy
    virtual TierQueue& host() = 0;    // nodes with a host copy only
    virtual std::size_t bytes() const = 0;

    // -- events from which a policy may learn
    // A lease is granted, so the blocks that it hits are not queued; `seed` is that of its context.
    // May set Lease::classes, from which the blocks that it computes get their class. Returns true
    // when the order of the device nodes has changed.
    virtual bool on_grant(Lease& /*lease*/, std::uint64_t /*seed*/) { return false; }
    virtual void on_device_resized(std::uint32_t /*blocks*/) {}
};

// Names of all policies.
std::span<const std::string_view> eviction_policies();
// The order of the policy `config.eviction`. Throws ConfigError for an unknown name.
std::unique_ptr<EvictionOrder> make_eviction_order(const CoreConfig& config, PrefixTree& tree);

}  // namespace aiokv
