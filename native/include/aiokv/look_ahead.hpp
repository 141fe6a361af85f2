// The front of the device queue, as far as write-backs have looked at it.
//
// Nodes up to and including last_ have the flag kAhead: they have a host copy, are being saved, or
// may be dropped. At least count_ of them are still in the queue. The next walk starts behind
// last_, so that each block is looked at once.
#pragma once

#include <cstdint>

#include "aiokv/eviction_order.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class LookAhead {
  public:
    LookAhead(PrefixTree& tree, TierQueue& queue) : tree_(tree), queue_(queue) {}

    std::uint32_t count() const { return count_; }
    bool is_begun() const { return last_ != kNone; }

    // The node behind those that were looked at, or kNone.
    NodeId next() { return last_ == kNone ? queue_.front() : queue_.after(last_); }
    // The node is next().
    void add(NodeId node) {
        add_front(node);
        last_ = node;
    }
    // The node was put before all others of the queue; is_begun().
    void add_front(NodeId node) {
        tree_[node].set(kAhead);
        ++count_;
    }
    // Its removal from the queue must be told to remove().
    bool knows(NodeId node) const { return tree_[node].has(kAhead) || node == last_; }
    // The node is going to leave the queue.
    void remove(NodeId node) {
        if (!knows(node)) return;
        if (tree_[node].has(kAhead)) count_ -= count_ > 0;
        if (node != last_) return;
        last_ = queue_.before(node);
        if (last_ == kNone) count_ = 0;
    }
    // The next walk begins at the front.
    void restart() {
        last_ = kNone;
        count_ = 0;
    }

  private:
    PrefixTree& tree_;
    TierQueue& queue_;
    NodeId last_ = kNone;  // kNone: nothing was looked at
    std::uint32_t count_ = 0;
};

}  // namespace aiokv
