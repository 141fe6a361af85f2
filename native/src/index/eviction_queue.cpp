#include "aiokv/eviction_queue.hpp"

#include <algorithm>

namespace aiokv {
namespace {

// The scores decide when they promise this much more than LRU hits, and until it is this much.
constexpr double kEnterGain = 0.03;
constexpr double kLeaveGain = 0.018;
constexpr std::uint64_t kHalfEpochUnits =
    2;                                    // a segment is judged by its age halfway to the next sort
constexpr std::uint64_t kMergeShare = 5;  // merged segments span at most 1/5 of their age

}  // namespace

EvictionQueue::EvictionQueue(PrefixTree& tree, std::uint32_t capacity_blocks,
                             const ReuseModel* model)
    : tree_(tree), model_(model), capacity_(capacity_blocks), segments_(1) {
    if (model_ == nullptr) return;
    for (auto& segments : by_class_) segments.push_back(open_segment());
    sort();
}

// -- lists -----------------------------------------------------------------------------------

void EvictionQueue::link_back(SegmentId id, NodeId node) {
    Segment& segment = segments_[id];
    Node& n = tree_[node];
    n.next = kEnd | id;
    if (segment.tail == kNone) {
        n.prev = kEnd | id;
        segment.head = node;
    } else {
        n.prev = segment.tail;
        tree_[segment.tail].next = node;
    }
    segment.tail = node;
    ++size_;
}

void EvictionQueue::link_front(SegmentId id, NodeId node) {
    Segment& segment = segments_[id];
    Node& n = tree_[node];
    n.prev = kEnd | id;
    if (segment.head == kNone) {
        n.next = kEnd | id;
        segment.tail = node;
    } else {
        n.next = segment.head;
        tree_[segment.head].prev = node;
    }
    segment.head = node;
    ++size_;
}

void EvictionQueue::remove(NodeId node) {
    Node& n = tree_[node];
    const bool first = (n.prev & kEnd) != 0;
    const bool last = (n.next & kEnd) != 0;
    if (first) {
        segments_[n.prev & ~kEnd].head = last ? kNone : n.next;
    } else {
        tree_[n.prev].next = n.next;
    }
    if (last) {
        segments_[n.next & ~kEnd].tail = first ? kNone : n.prev;
    } else {
        tree_[n.next].prev = n.prev;
    }
    n.prev = n.next = kNone;
    --size_;
}

NodeId EvictionQueue::first_from(std::size_t place) const {
    for (; place < order_.size(); ++place) {
        if (segments_[order_[place]].head != kNone) return segments_[order_[place]].head;
    }
    return kNone;
}

NodeId EvictionQueue::front() {
    if (segments_[kFront].head != kNone) return segments_[kFront].head;
    while (cursor_ < order_.size() && segments_[order_[cursor_]].head == kNone) {
        ++cursor_;
        receiving_since_ = kNever;  // what comes next may have to move the cursor back
    }
    return cursor_ < order_.size() ? segments_[order_[cursor_]].head : kNone;
}

NodeId EvictionQueue::after(NodeId node) const {
    const NodeId next = tree_[node].next;
    if ((next & kEnd) == 0) return next;
    const SegmentId id = next & ~kEnd;
    return first_from(id == kFront ? cursor_ : segments_[id].place + 1);
}

// -- segments --------------------------------------------------------------------------------

// A lease gives back many blocks of one class at one time.
void EvictionQueue::receive(ReuseClass reuse_class) {
    receiving_class_ = reuse_class;
    receiving_since_ = model_->now();
    receiving_ = by_class_[reuse_class].back();
    Segment& segment = segments_[receiving_];
    segment.newest = receiving_since_;
    cursor_ = std::min<std::size_t>(cursor_, segment.place);
}

EvictionQueue::SegmentId EvictionQueue::open_segment() {
    auto id = static_cast<SegmentId>(segments_.size());
    if (free_.empty()) {
        segments_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
        segments_[id] = Segment{};
    }
    segments_[id].newest = segments_[id].oldest = model_->now();
    return id;
}

// The younger one's nodes go behind the older one's, if both together are young enough a span.
bool EvictionQueue::merge(SegmentId younger, SegmentId older) {
    Segment& a = segments_[older];
    const Segment& b = segments_[younger];
    const std::uint64_t age = model_->now() - b.newest;
    if (b.head != kNone && a.head != kNone && (b.newest - a.oldest) * kMergeShare > age) {
        return false;
    }
    if (b.head != kNone) {
        if (a.head == kNone) {
            a.head = b.head;
            a.oldest = b.oldest;
            tree_[b.head].prev = kEnd | older;
        } else {
            tree_[a.tail].next = b.head;
            tree_[b.head].prev = a.tail;
        }
        a.tail = b.tail;
        tree_[a.tail].next = kEnd | older;
        a.newest = b.newest;
    }
    free_.push_back(younger);
    return true;
}

// Close the newest segment of a class and open another; merge what is old.
void EvictionQueue::age(std::vector<SegmentId>& segments) {
    std::size_t kept = 1;
    for (std::size_t i = 1; i < segments.size(); ++i) {
        if (!merge(segments[i], segments[kept - 1])) segments[kept++] = segments[i];
    }
    segments.resize(kept);
    Segment& newest = segments_[segments.back()];
    if (newest.head == kNone) {
        newest.newest = newest.oldest = model_->now();
    } else {
        segments.push_back(open_segment());
    }
}

void EvictionQueue::refresh() {
    if (model_ == nullptr || epoch_ == model_->epoch()) return;
    epoch_ = model_->epoch();
    for (auto& segments : by_class_) age(segments);
    if (learnt_ != model_->learnt()) {
        learnt_ = model_->learnt();
        const double wanted = by_recency_ ? kEnterGain : kLeaveGain;
        by_recency_ = !model_->is_warm() || model_->predicted_gain(capacity_) < wanted;
    }
    sort();
}

void EvictionQueue::sort() {
    const std::uint64_t now = model_->now();
    order_.clear();
    for (std::uint32_t c = 0; c < ReuseFeatures::kClasses; ++c) {
        for (const SegmentId id : by_class_[c]) {
            Segment& s = segments_[id];
            const std::uint64_t age = now + kHalfEpochUnits - (s.newest + s.oldest) / 2;
            s.score = by_recency_ ? 0.0 : model_->score(static_cast<ReuseClass>(c), age);
            order_.push_back(id);
        }
    }
    std::stable_sort(order_.begin(), order_.end(), [this](SegmentId x, SegmentId y) {
        const Segment& a = segments_[x];
        const Segment& b = segments_[y];
        return a.score != b.score ? a.score < b.score : a.newest < b.newest;
    });
    for (std::size_t i = 0; i < order_.size(); ++i) {
        segments_[order_[i]].place = static_cast<std::uint32_t>(i);
    }
    cursor_ = 0;
    receiving_since_ = kNever;
}

}  // namespace aiokv
