#include "aiokv/eviction_queue.hpp"

#include <algorithm>
#include <limits>

#include "aiokv/node.hpp"
#include "aiokv/shadow_cache.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {
namespace {

constexpr std::pair<double, std::uint32_t> kLowest{-1.0, 0};  // lower than all ranks

}  // namespace

template <class Nodes>
EvictionQueue<Nodes>::EvictionQueue(Nodes& nodes, const ReuseModel* model)
    : nodes_(nodes),
      model_(model),
      kinds_(model == nullptr ? 0 : ~std::uint64_t{0}),
      newest_bucket_(model == nullptr ? 0 : model->bucket_of(0)),
      cohorts_(1) {
    make_room_for_class(0);
}

// -- nodes -----------------------------------------------------------------------------------

template <class Nodes>
void EvictionQueue<Nodes>::remove(Id node) {
    auto& n = nodes_[node];
    const bool first = (n.prev & kEnd) != 0;
    const bool last = (n.next & kEnd) != 0;
    if (first) {
        cohorts_[n.prev & ~kEnd].head = last ? kNil : n.next;
    } else {
        nodes_[n.prev].next = n.next;
    }
    if (last) {
        cohorts_[n.next & ~kEnd].tail = first ? kNil : n.prev;
    } else {
        nodes_[n.next].prev = n.prev;
    }
    if (first && last) close_cohort(n.next & ~kEnd);
    n.prev = n.next = kNil;
    --size_;
}

template <class Nodes>
void EvictionQueue<Nodes>::clear() {
    cohorts_.assign(1, Cohort{});
    free_.clear();
    oldest_ = newest_ = kFront;
    std::ranges::fill(classes_, Class{});
    std::ranges::fill(used_classes_, 0);
    choose_victim(kNoCell);
    size_ = 0;
}

template <class Nodes>
typename EvictionQueue<Nodes>::Id EvictionQueue<Nodes>::front() {
    if (cohorts_[kFront].head != kNil) return cohorts_[kFront].head;
    if (!is_by_score()) return head_of(oldest_);
    if (victim_ == kNoCell) choose_victim(lowest_cell(kLowest));
    return head_of(victim_cohort_);
}

template <class Nodes>
typename EvictionQueue<Nodes>::Id EvictionQueue<Nodes>::after(Id node) const {
    const Id next = nodes_[node].next;
    if ((next & kEnd) == 0) return next;
    const CohortId id = next & ~kEnd;
    if (!is_by_score()) return head_of(id == kFront ? oldest_ : cohorts_[id].newer);
    if (id != kFront && next_in_bucket(id) != kFront) return head_of(next_in_bucket(id));
    const Cell cell = lowest_cell(id == kFront ? kLowest : rank_of(cohorts_[id].cell));
    return cell == kNoCell ? kNil : head_of(oldest_in(cell));
}

// -- cohorts ------------------------------------------------------------------------------------

template <class Nodes>
void EvictionQueue<Nodes>::open_cohort(std::uint64_t kind) {
    auto id = static_cast<CohortId>(cohorts_.size());
    if (free_.empty()) {
        cohorts_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    Cohort& cohort = cohorts_[id];
    cohort = {.kind = kind, .older = newest_};
    (newest_ == kFront ? oldest_ : cohorts_[newest_].newer) = id;
    newest_ = id;
    file(id, newest_bucket_);
    if (victim_ != kNoCell && rank_of(cohort.cell) < rank_of(victim_)) choose_victim(cohort.cell);
}

// Adds a cohort to its class, as the newest one. Classes differ by label only while labels are
// followed.
template <class Nodes>
void EvictionQueue<Nodes>::file(CohortId id, std::uint32_t bucket) {
    Cohort& cohort = cohorts_[id];
    const ReuseClass reuse_class = order_ == EvictionRank::kLabelledScore
                                       ? cohort.reuse_class()
                                       : ReuseFeatures::with_label(cohort.reuse_class(), 0);
    make_room_for_class(reuse_class);
    Class& c = classes_[reuse_class];
    cohort.older_of_class = c.newest;
    cohort.newer_of_class = kFront;
    if (c.newest != kFront) cohorts_[c.newest].newer_of_class = id;
    c.newest = id;
    enter_cell(id, reuse_class * ReturnRates::kBuckets + bucket);
}

// The classes of a label come into use together.
template <class Nodes>
void EvictionQueue<Nodes>::make_room_for_class(ReuseClass reuse_class) {
    if (reuse_class < classes_.size()) return;
    const std::size_t of_label = model_ == nullptr ? 1 : ReuseFeatures::kUnlabelled;
    classes_.resize((reuse_class / of_label + 1) * of_label);
    used_classes_.resize((classes_.size() + 63) / 64);
}

template <class Nodes>
void EvictionQueue<Nodes>::file_all_again() {
    std::ranges::fill(classes_, Class{});
    std::ranges::fill(used_classes_, 0);
    for (CohortId id = oldest_; id != kFront; id = cohorts_[id].newer) {
        file(id, model_->bucket_of(now_ - cohorts_[id].time()));
    }
}

template <class Nodes>
void EvictionQueue<Nodes>::close_cohort(CohortId id) {
    if (id == kFront) return;
    leave_cell(id);
    const Cohort& cohort = cohorts_[id];
    if (cohort.older_of_class != kFront) {
        cohorts_[cohort.older_of_class].newer_of_class = cohort.newer_of_class;
    }
    (cohort.newer_of_class == kFront ? classes_[cohort.cell / ReturnRates::kBuckets].newest
                                     : cohorts_[cohort.newer_of_class].older_of_class) =
        cohort.older_of_class;
    (cohort.older == kFront ? oldest_ : cohorts_[cohort.older].newer) = cohort.newer;
    (cohort.newer == kFront ? newest_ : cohorts_[cohort.newer].older) = cohort.older;
    free_.push_back(id);
}

// -- cells -----------------------------------------------------------------------------------

// Adds the cohort to its cell as the newest one.
template <class Nodes>
void EvictionQueue<Nodes>::enter_cell(CohortId id, Cell cell) {
    const std::uint32_t bucket = cell % ReturnRates::kBuckets;
    Class& c = classes_[cell / ReturnRates::kBuckets];
    cohorts_[id].cell = cell;
    if (c.oldest[bucket] == kFront) c.oldest[bucket] = id;
    c.buckets |= 1u << bucket;
    const std::uint32_t reuse_class = cell / ReturnRates::kBuckets;
    used_classes_[reuse_class / 64] |= std::uint64_t{1} << reuse_class % 64;
}

template <class Nodes>
void EvictionQueue<Nodes>::leave_cell(CohortId id) {
    const Cell cell = cohorts_[id].cell;
    const std::uint32_t bucket = cell % ReturnRates::kBuckets;
    Class& c = classes_[cell / ReturnRates::kBuckets];
    if (c.oldest[bucket] != id) return;
    c.oldest[bucket] = next_in_bucket(id);
    if (c.oldest[bucket] == kFront) c.buckets &= ~(1u << bucket);
    const std::uint32_t reuse_class = cell / ReturnRates::kBuckets;
    if (c.buckets == 0) used_classes_[reuse_class / 64] &= ~(std::uint64_t{1} << reuse_class % 64);
    if (victim_ == cell) choose_victim(c.oldest[bucket] == kFront ? kNoCell : cell);
}

template <class Nodes>
void EvictionQueue<Nodes>::choose_victim(Cell cell) {
    victim_ = cell;
    victim_cohort_ = cell == kNoCell ? kFront : oldest_in(cell);
}

// Returns the lowest cell with cohorts whose rank is above `above`.
template <class Nodes>
typename EvictionQueue<Nodes>::Cell EvictionQueue<Nodes>::lowest_cell(Rank above) const {
    Cell lowest = kNoCell;
    Rank lowest_rank{std::numeric_limits<double>::infinity(), 0};
    for_each_used_class([&](std::uint32_t c) {
        const ReturnRates::Ages& scores = scores_of(c);
        for (std::uint32_t rest = classes_[c].buckets; rest != 0; rest &= rest - 1) {
            const auto bucket = static_cast<std::uint32_t>(std::countr_zero(rest));
            if (scores[bucket] > lowest_rank.first) continue;
            const Rank rank = rank_of(scores[bucket], c, bucket);
            if (rank <= above || rank >= lowest_rank) continue;
            lowest = c * ReturnRates::kBuckets + bucket;
            lowest_rank = rank;
        }
    });
    return lowest;
}

template <class Nodes>
bool EvictionQueue<Nodes>::choose(EvictionRank rank) {
    now_ = model_->now();
    if (epoch_ == model_->epoch() && order_ == rank) return false;
    epoch_ = model_->epoch();
    const bool was_by_score = is_by_score();
    constexpr EvictionRank kByLabel = EvictionRank::kLabelledScore;
    const bool classes_change = (order_ == kByLabel) != (rank == kByLabel);
    order_ = rank;
    if (classes_change) file_all_again();
    if (is_by_score()) age();
    choose_victim(kNoCell);
    return was_by_score || is_by_score();
}

// Moves cohorts to the cells of their present ages. The cohorts of a class are in order of age.
template <class Nodes>
void EvictionQueue<Nodes>::age() {
    for_each_used_class([this](std::uint32_t c) {
        for (std::uint32_t rest = classes_[c].buckets; rest != 0;) {
            const auto bucket = static_cast<std::uint32_t>(std::bit_width(rest)) - 1;
            rest &= ~(1u << bucket);
            for (CohortId id; (id = classes_[c].oldest[bucket]) != kFront;) {
                const std::uint32_t older = model_->bucket_of(now_ - cohorts_[id].time());
                if (older <= bucket) break;
                leave_cell(id);
                enter_cell(id, c * ReturnRates::kBuckets + older);
            }
        }
    });
}

template class EvictionQueue<Slab<Run>>;
template class EvictionQueue<ShadowCache::Stretches>;

}  // namespace aiokv
