// The nodes that may be evicted from one tier, in the order in which they should be evicted.
//
// One list in order of recency, cut into cohorts: nodes of one reuse class that were pushed one
// after the other. Eviction by recency follows the list. Eviction by score takes the oldest cohort
// of the *cell* (class and bucket of age) with the lowest score. Both orders are maintained at any
// time, so choose() costs the same however many nodes there are. Without a model, all nodes are one
// cohort. A node that was blocked when its turn came returns to the front, before all cohorts.
//
// The links are in the nodes. The outer links of a cohort's first and last node name the cohort, so
// that a node is taken out in O(1).
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "aiokv/reuse_model.hpp"

namespace aiokv {

// Order of eviction.
enum class EvictionRank : std::uint8_t {
    kRecency,
    kScore,
    kLabelledScore,  // only while the model has labels
};

// `Nodes`: array of nodes with the links `prev` and `next`, and a `reuse_class`.
template <class Nodes>
class EvictionQueue {
  public:
    using Id = std::uint32_t;
    static constexpr Id kNil = 0xffffffff;

    // Without a model, the order is that of push_back.
    EvictionQueue(Nodes& nodes, const ReuseModel* model);

    Id front();
    Id after(Id node) const;
    // Returns the node that is evicted right before `node` and is in the same cohort, or kNil.
    Id before(Id node) const {
        const Id prev = nodes_[node].prev;
        return (prev & kEnd) != 0 ? kNil : prev;
    }
    std::uint32_t size() const { return size_; }
    std::size_t bytes() const {
        return cohorts_.capacity() * sizeof(Cohort) + classes_.capacity() * sizeof(Class);
    }

    void push_back(Id node) {  // used now
        const std::uint64_t kind = (now_ << kClassBits | nodes_[node].reuse_class) & kinds_;
        if (cohorts_[newest_].kind != kind) open_cohort(kind);
        const Id end = kEnd | newest_;
        const Id tail = cohorts_[newest_].tail;
        link(node, tail == kNil ? end : tail, end);
    }
    void push_front(Id node) {
        const Id end = kEnd | kFront;
        const Id head = cohorts_[kFront].head;
        link(node, end, head == kNil ? end : head);
    }
    // Insert a node right before, or right after, a node of the queue, in the same cohort.
    void insert_before(Id node, Id next) { link(node, nodes_[next].prev, next); }
    void insert_after(Id node, Id previous) { link(node, previous, nodes_[previous].next); }
    void remove(Id node);
    void clear();  // removes all nodes, without access to them

    // Takes over the model's clock and scores. Returns true if the order of nodes has changed.
    bool choose(EvictionRank rank);

  private:
    using CohortId = std::uint32_t;
    static constexpr CohortId kFront = 0;            // also: no cohort
    static constexpr std::uint32_t kEnd = 1u << 31;  // a link with this bit names a cohort

    static constexpr std::uint32_t kClassBits = 16;
    static constexpr std::uint32_t kCells = ReuseFeatures::kClasses * ReturnRates::kBuckets;
    using Cell = std::uint32_t;  // class * kBuckets + bucket
    static constexpr Cell kNoCell = kCells;

    struct Cohort {
        std::uint64_t kind = ~std::uint64_t{0};  // time of the model's clock, and then the class
        Id head = kNil;
        Id tail = kNil;
        CohortId older = kFront;  // in order of recency
        CohortId newer = kFront;
        CohortId older_of_class = kFront;
        CohortId newer_of_class = kFront;
        Cell cell = kNoCell;

        std::uint64_t time() const { return kind >> kClassBits; }
        ReuseClass reuse_class() const { return static_cast<ReuseClass>(kind); }
    };
    struct Class {
        CohortId newest = kFront;
        std::uint32_t buckets = 0;                             // bit b = 1: bucket b has a cohort
        std::array<CohortId, ReturnRates::kBuckets> oldest{};  // by bucket
    };

    // Cells are ordered by score, then by age.
    using Rank = std::pair<double, Cell>;

    // Of cells with equal scores, the older one is lower.
    static Rank rank_of(double score, std::uint32_t reuse_class, std::uint32_t bucket) {
        return {score, (ReturnRates::kBuckets - bucket) * ReuseFeatures::kClasses + reuse_class};
    }
    Rank rank_of(Cell cell) const {
        const std::uint32_t reuse_class = cell / ReturnRates::kBuckets;
        const std::uint32_t bucket = cell % ReturnRates::kBuckets;
        return rank_of(scores_of(reuse_class)[bucket], reuse_class, bucket);
    }
    const ReturnRates::Ages& scores_of(std::uint32_t reuse_class) const {
        return model_->scores(static_cast<ReuseClass>(reuse_class),
                              order_ == EvictionRank::kLabelledScore);
    }
    CohortId oldest_in(Cell cell) const {
        return classes_[cell / ReturnRates::kBuckets].oldest[cell % ReturnRates::kBuckets];
    }
    Id head_of(CohortId id) const { return id == kFront ? kNil : cohorts_[id].head; }
    CohortId next_in_bucket(CohortId id) const {
        const CohortId next = cohorts_[id].newer_of_class;
        return next != kFront && cohorts_[next].cell == cohorts_[id].cell ? next : kFront;
    }
    bool is_by_score() const { return order_ != EvictionRank::kRecency; }
    // Links a node between two neighbours, of which each is a node or the end of its cohort.
    void link(Id node, Id prev, Id next) {
        nodes_[node].prev = prev;
        nodes_[node].next = next;
        ((prev & kEnd) != 0 ? cohorts_[prev & ~kEnd].head : nodes_[prev].next) = node;
        ((next & kEnd) != 0 ? cohorts_[next & ~kEnd].tail : nodes_[next].prev) = node;
        ++size_;
    }
    void open_cohort(std::uint64_t kind);
    void file(CohortId id, std::uint32_t bucket);
    void file_all_again();
    void make_room_for_class(ReuseClass reuse_class);
    [[gnu::noinline]] void close_cohort(CohortId id);  // keeps remove() short
    void enter_cell(CohortId id, Cell cell);
    void leave_cell(CohortId id);
    void choose_victim(Cell cell);
    Cell lowest_cell(Rank above) const;
    template <class Visit>
    void for_each_used_class(Visit visit) const {
        for (std::uint32_t word = 0; word < used_classes_.size(); ++word) {
            for (std::uint64_t some = used_classes_[word]; some != 0; some &= some - 1) {
                visit(word * 64 + static_cast<std::uint32_t>(std::countr_zero(some)));
            }
        }
    }
    void age();

    Nodes& nodes_;
    const ReuseModel* model_;
    const std::uint64_t kinds_;  // 0 without a model: all nodes are of one kind
    const std::uint32_t newest_bucket_;
    std::uint32_t size_ = 0;
    std::uint64_t now_ = 0;
    std::uint64_t epoch_ = 0;
    EvictionRank order_ = EvictionRank::kRecency;
    std::vector<Cohort> cohorts_;
    std::vector<CohortId> free_;
    CohortId oldest_ = kFront;
    CohortId newest_ = kFront;
    std::vector<Class> classes_;               // up to the last one that was used
    std::vector<std::uint64_t> used_classes_;  // bit c = 1: class c has a cohort
    Cell victim_ = kNoCell;                    // lowest cell, if it is known and has a cohort
    CohortId victim_cohort_ = kFront;          // oldest cohort of victim_
};

}  // namespace aiokv
