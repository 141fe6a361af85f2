// An intrusive list of nodes: O(1) at both ends and in the middle.
#pragma once

#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class NodeQueue {
  public:
    explicit NodeQueue(PrefixTree& tree) : tree_(tree) {}

    NodeId front() const { return head_; }
    std::uint32_t size() const { return size_; }

    void push_back(NodeId node) {
        link(tail_, node, kNone);
        tail_ = node;
        if (head_ == kNone) head_ = node;
    }
    void push_front(NodeId node) {
        link(kNone, node, head_);
        head_ = node;
        if (tail_ == kNone) tail_ = node;
    }
    void remove(NodeId node) {
        Node& n = tree_[node];
        (n.prev == kNone ? head_ : tree_[n.prev].next) = n.next;
        (n.next == kNone ? tail_ : tree_[n.next].prev) = n.prev;
        n.prev = n.next = kNone;
        --size_;
    }

  private:
    void link(NodeId prev, NodeId node, NodeId next) {
        tree_[node].prev = prev;
        tree_[node].next = next;
        if (prev != kNone) tree_[prev].next = node;
        if (next != kNone) tree_[next].prev = node;
        ++size_;
    }

    PrefixTree& tree_;
    NodeId head_ = kNone;
    NodeId tail_ = kNone;
    std::uint32_t size_ = 0;
};

}  // namespace aiokv
