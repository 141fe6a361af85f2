#include "aiokv/eviction_queue.hpp"

#include <algorithm>

#include "aiokv/prefix_tree.hpp"
#include "aiokv/shadow_cache.hpp"

namespace aiokv {

template <class Nodes>
EvictionQueue<Nodes>::EvictionQueue(Nodes& nodes, const ReuseModel* model)
    : nodes_(nodes),
      model_(model),
      newest_bucket_(model == nullptr ? 0 : static_cast<std::uint8_t>(model->bucket_of(0))),
      runs_(1),
      classes_(ReuseFeatures::kClasses) {}

// -- nodes -----------------------------------------------------------------------------------

template <class Nodes>
void EvictionQueue<Nodes>::push_front(Id node) {
    Run& run = runs_[kFront];
    auto& n = nodes_[node];
    n.prev = kEnd | kFront;
    if (run.head == kNil) {
        n.next = kEnd | kFront;
        run.tail = node;
    } else {
        n.next = run.head;
        nodes_[run.head].prev = node;
    }
    run.head = node;
    ++size_;
}

template <class Nodes>
void EvictionQueue<Nodes>::remove(Id node) {
    auto& n = nodes_[node];
    const bool first = (n.prev & kEnd) != 0;
    const bool last = (n.next & kEnd) != 0;
    if (first) {
        runs_[n.prev & ~kEnd].head = last ? kNil : n.next;
    } else {
        nodes_[n.prev].next = n.next;
    }
    if (last) {
        runs_[n.next & ~kEnd].tail = first ? kNil : n.prev;
    } else {
        nodes_[n.next].prev = n.prev;
    }
    if (first && last) close_run(n.next & ~kEnd);
    n.prev = n.next = kNil;
    --size_;
}

template <class Nodes>
typename EvictionQueue<Nodes>::RunId EvictionQueue<Nodes>::run_from(std::size_t place) const {
    while (place < order_.size() && oldest_of(order_[place]) == kFront) ++place;
    return place < order_.size() ? oldest_of(order_[place]) : kFront;
}

template <class Nodes>
typename EvictionQueue<Nodes>::Id EvictionQueue<Nodes>::front() {
    if (runs_[kFront].head != kNil) return runs_[kFront].head;
    if (!by_score_) return head_of(oldest_);
    while (cursor_ < order_.size() && oldest_of(order_[cursor_]) == kFront) ++cursor_;
    return head_of(run_from(cursor_));
}

template <class Nodes>
typename EvictionQueue<Nodes>::Id EvictionQueue<Nodes>::after(Id node) const {
    const Id next = nodes_[node].next;
    if ((next & kEnd) == 0) return next;
    const RunId id = next & ~kEnd;
    if (!by_score_) return head_of(id == kFront ? oldest_ : runs_[id].newer);
    if (id == kFront) return head_of(run_from(cursor_));
    if (const RunId run = next_in_bucket(id); run != kFront) return head_of(run);
    const auto cell = std::find_if(order_.begin(), order_.end(), [&](const Cell& c) {
        return c.reuse_class == runs_[id].reuse_class && c.bucket == runs_[id].bucket;
    });
    return head_of(run_from(static_cast<std::size_t>(cell - order_.begin()) + 1));
}

// -- runs ------------------------------------------------------------------------------------

template <class Nodes>
void EvictionQueue<Nodes>::open_run(ReuseClass reuse_class) {
    auto id = static_cast<RunId>(runs_.size());
    if (free_.empty()) {
        runs_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    Class& c = classes_[reuse_class];
    runs_[id] = {.older = newest_,
                 .older_of_class = c.newest,
                 .time = now_,
                 .reuse_class = reuse_class,
                 .bucket = newest_bucket_};
    (newest_ == kFront ? oldest_ : runs_[newest_].newer) = id;
    if (c.newest != kFront) runs_[c.newest].newer_of_class = id;
    newest_ = c.newest = id;
    if (c.oldest[newest_bucket_] == kFront) c.oldest[newest_bucket_] = id;
    cursor_ = std::min<std::size_t>(cursor_, c.place);
}

template <class Nodes>
void EvictionQueue<Nodes>::close_run(RunId id) {
    if (id == kFront) return;
    const Run& run = runs_[id];
    Class& c = classes_[run.reuse_class];
    if (c.oldest[run.bucket] == id) c.oldest[run.bucket] = next_in_bucket(id);
    if (run.older_of_class != kFront) {
        runs_[run.older_of_class].newer_of_class = run.newer_of_class;
    }
    (run.newer_of_class == kFront ? c.newest : runs_[run.newer_of_class].older_of_class) =
        run.older_of_class;
    (run.older == kFront ? oldest_ : runs_[run.older].newer) = run.newer;
    (run.newer == kFront ? newest_ : runs_[run.newer].older) = run.older;
    free_.push_back(id);
}

template <class Nodes>
bool EvictionQueue<Nodes>::choose(bool by_score) {
    now_ = static_cast<std::uint32_t>(model_->now());
    if (epoch_ == model_->epoch() && by_score_ == by_score) return false;
    epoch_ = model_->epoch();
    age();
    const bool changed = by_score || by_score_;
    by_score_ = by_score;
    if (by_score_) sort();
    return changed;
}

// Move runs to the buckets of their ages.
template <class Nodes>
void EvictionQueue<Nodes>::age() {
    for (Class& c : classes_) {
        if (c.newest == kFront) continue;
        for (std::uint32_t bucket = ReturnRates::kBuckets; bucket-- > 0;) {
            for (RunId id = c.oldest[bucket]; id != kFront; id = c.oldest[bucket]) {
                const std::uint32_t older = model_->bucket_of(now_ - runs_[id].time);
                if (older <= bucket) break;
                c.oldest[bucket] = next_in_bucket(id);
                runs_[id].bucket = static_cast<std::uint8_t>(older);
                if (c.oldest[older] == kFront) c.oldest[older] = id;
            }
        }
    }
}

// The newest cells are sorted in also while they are empty: runs are opened there.
template <class Nodes>
void EvictionQueue<Nodes>::sort() {
    order_.clear();
    for (std::uint32_t c = 0; c < ReuseFeatures::kClasses; ++c) {
        for (std::uint32_t b = 0; b < ReturnRates::kBuckets; ++b) {
            if (b != newest_bucket_ && classes_[c].oldest[b] == kFront) continue;
            order_.push_back({model_->score(static_cast<ReuseClass>(c), b),
                              static_cast<ReuseClass>(c), static_cast<std::uint8_t>(b)});
        }
    }
    std::sort(order_.begin(), order_.end(), [](const Cell& x, const Cell& y) {
        if (x.score != y.score) return x.score < y.score;
        return x.bucket != y.bucket ? x.bucket > y.bucket : x.reuse_class < y.reuse_class;
    });
    for (std::size_t i = 0; i < order_.size(); ++i) {
        if (order_[i].bucket == newest_bucket_) {
            classes_[order_[i].reuse_class].place = static_cast<std::uint32_t>(i);
        }
    }
    cursor_ = 0;
}

template class EvictionQueue<PrefixTree>;
template class EvictionQueue<ShadowCache::Stretches>;

}  // namespace aiokv
