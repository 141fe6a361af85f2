// The front part of the device queue that write-backs have already looked at.
//
// Blocks up to and including last_ have the flag kAhead: they have a host copy, are being saved, or
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
    // Returns the last block that was looked at, or kNone.
    NodeId last() const { return last_; }

    // Returns the first block that was not looked at, or kNone.
    NodeId next() {
        return last_ == kNone ? tree_.last_of(queue_.front()) : next_victim(tree_, queue_, last_);
    }
    // Marks next() as looked at.
    void add(NodeId node) {
        add_front(node);
        last_ = node;
    }
    // Marks a block that was just put to the front of the queue. Requires is_begun().
    void add_front(NodeId node) {
        tree_[node].set(kAhead);
        tree_.run(node).set(kMayBeAhead);
        ++count_;
    }
    // Call before a run leaves the queue.
    void remove(RunId id) {
        Run& run = tree_.runs()[id];
        if (!run.has(kMayBeAhead)) return;
        run.clear(kMayBeAhead);
        for (NodeId node = run.first; node <= run.last(); ++node) {
            if (!tree_[node].has(kAhead)) continue;
            tree_[node].clear(kAhead);
            count_ -= count_ > 0;
        }
        if (last_ == kNone || tree_.run_of(last_) != id) return;
        const RunId before = queue_.before(id);
        if (before == kNoRun) return restart();
        last_ = tree_.runs()[before].first;
        tree_.runs()[before].set(kMayBeAhead);
    }
    // Lets the next walk begin at the front.
    void restart() {
        last_ = kNone;
        count_ = 0;
    }

  private:
    PrefixTree& tree_;
    TierQueue& queue_;
    NodeId last_ = kNone;  // last block looked at, or kNone
    std::uint32_t count_ = 0;
};

}  // namespace aiokv
