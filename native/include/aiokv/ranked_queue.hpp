// The TierQueue of the policies that order nodes by recency or by score.
#pragma once

#include <cstddef>
#include <span>

#include "aiokv/eviction_order.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class RankedQueue final : public TierQueue {
  public:
    // Without a model, the order is that of push_back.
    RankedQueue(PrefixTree& tree, const ReuseModel* model) : queue_(tree, model) {}

    NodeId front() override { return queue_.front(); }
    NodeId after(NodeId node) const override { return queue_.after(node); }
    NodeId before(NodeId node) const override { return queue_.before(node); }
    std::uint32_t size() const override { return queue_.size(); }
    void push_back(std::span<const NodeId> path) override {
        for (std::size_t i = path.size(); i-- > 0;) queue_.push_back(path[i]);
    }
    void push_front(NodeId node) override { queue_.push_front(node); }
    void remove(std::span<const NodeId> path) override {
        for (const NodeId node : path) queue_.remove(node);
    }

    // See EvictionQueue.
    bool choose(bool by_score) { return queue_.choose(by_score); }
    std::size_t bytes() const { return queue_.bytes(); }

  private:
    EvictionQueue<PrefixTree> queue_;
};

}  // namespace aiokv
