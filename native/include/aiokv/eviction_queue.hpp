// The nodes that may be evicted from one tier, in the order in which they should go.
//
// lru: one list. s3fifo: S3-FIFO with more queues than a small and a main one: a list ("segment")
// for each reuse class and span of time, first in, first out. The ghost list of ReuseModel tells
// the class; which segment goes first is learned, so the split between them adapts. Segments are
// sorted by the score of their class and age whenever time has moved on, and merged as they age,
// so there are few. What was blocked when its turn came returns to the front, before all segments.
//
// The links are in the nodes. The outer links of a segment's first and last node name the segment,
// so that a node is taken out, and two segments are merged, in O(1).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "aiokv/prefix_tree.hpp"
#include "aiokv/reuse_model.hpp"

namespace aiokv {

enum class EvictionKind : std::uint8_t { kLru, kS3Fifo };

class EvictionQueue {
  public:
    // Without a model the order is that of push_back: lru.
    EvictionQueue(PrefixTree& tree, std::uint32_t capacity_blocks, const ReuseModel* model);

    NodeId front();
    // The node whose turn is after `node`'s, or kNone; for looking ahead.
    NodeId after(NodeId node) const;
    // The node whose turn is before `node`'s, in the same segment, or kNone.
    NodeId before(NodeId node) const {
        const NodeId prev = tree_[node].prev;
        return (prev & kEnd) != 0 ? kNone : prev;
    }
    std::uint32_t size() const { return size_; }

    void push_back(NodeId node) {  // used now
        if (model_ == nullptr) return link_back(kFront, node);
        const ReuseClass reuse_class = tree_[node].reuse_class;
        if (reuse_class != receiving_class_ || receiving_since_ != model_->now()) {
            receive(reuse_class);
        }
        link_back(receiving_, node);
    }
    void push_front(NodeId node) { link_front(kFront, node); }
    void remove(NodeId node);

    // Sort anew if the model's epoch has changed.
    void refresh();
    void resize(std::uint32_t capacity_blocks) { capacity_ = capacity_blocks; }

  private:
    using SegmentId = std::uint32_t;
    static constexpr SegmentId kFront = 0;
    static constexpr std::uint64_t kNever = ~std::uint64_t{0};
    static constexpr std::uint32_t kEnd = 0x80000000;  // a link with this bit names a segment

    struct Segment {
        NodeId head = kNone;
        NodeId tail = kNone;
        std::uint64_t newest = 0;  // units of the model's clock
        std::uint64_t oldest = 0;
        double score = 0;
        std::uint32_t place = 0;  // in order_
    };

    void link_back(SegmentId id, NodeId node);
    void link_front(SegmentId id, NodeId node);
    void receive(ReuseClass reuse_class);
    SegmentId open_segment();
    void age(std::vector<SegmentId>& segments);
    bool merge(SegmentId younger, SegmentId older);
    void sort();
    NodeId first_from(std::size_t place) const;

    PrefixTree& tree_;
    const ReuseModel* model_;
    std::uint32_t capacity_;
    std::uint32_t size_ = 0;
    std::uint64_t epoch_ = 0;
    std::uint64_t learnt_ = 0;
    bool by_recency_ = true;
    SegmentId receiving_ = kFront;  // the newest segment of its class
    ReuseClass receiving_class_ = 0;
    std::uint64_t receiving_since_ = kNever;
    std::size_t cursor_ = 0;  // no segment of order_ before it has a node
    std::vector<Segment> segments_;
    std::vector<SegmentId> free_;
    std::vector<SegmentId> order_;                                          // the next to go first
    std::array<std::vector<SegmentId>, ReuseFeatures::kClasses> by_class_;  // oldest first
};

}  // namespace aiokv
