// The TierQueue of the policies that order runs by recency or by score.
#pragma once

#include <cstddef>

#include "aiokv/eviction_order.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class RankedQueue final : public TierQueue {
  public:
    // Without a model, the order is that of push_back.
    RankedQueue(PrefixTree& tree, const ReuseModel* model) : queue_(tree.runs(), model) {}

    RunId front() override { return queue_.front(); }
    RunId after(RunId run) const override { return queue_.after(run); }
    RunId before(RunId run) const override { return queue_.before(run); }
    void push_back(RunId run) override { queue_.push_back(run); }
    void push_front(RunId run) override { queue_.push_front(run); }
    void insert_before(RunId part, RunId run) override { queue_.insert_before(part, run); }
    void insert_after(RunId part, RunId run) override { queue_.insert_after(part, run); }
    void remove(RunId run) override { queue_.remove(run); }
    void clear() override { queue_.clear(); }

    // See EvictionQueue.
    bool choose(EvictionRank rank) { return queue_.choose(rank); }
    std::size_t bytes() const { return queue_.bytes(); }

  private:
    EvictionQueue<Slab<Run>> queue_;
};

}  // namespace aiokv
