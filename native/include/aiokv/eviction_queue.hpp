// The nodes that may be evicted from one tier, in the order in which they should be evicted.
//
// One list in order of recency, cut into runs: nodes of one reuse class that were pushed one after
// the other. Eviction by recency follows the list. Eviction by score takes the oldest run of the
// *cell* (class and bucket of age) with the lowest score. Both orders are maintained at any time,
// so choose() costs the same however many nodes there are. Without a model, all nodes are one run.
// A node that was blocked when its turn came returns to the front, before all runs.
//
// The links are in the nodes. The outer links of a run's first and last node name the run, so that
// a node is taken out in O(1).
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "aiokv/reuse_model.hpp"

namespace aiokv {

// `Nodes`: node = nodes[id] has the links `prev` and `next`, and a `reuse_class`.
template <class Nodes>
class EvictionQueue {
  public:
    using Id = std::uint32_t;
    static constexpr Id kNil = 0xffffffff;

    // Without a model the order is that of push_back.
    EvictionQueue(Nodes& nodes, const ReuseModel* model);

    Id front();
    Id after(Id node) const;
    // The node whose turn is before `node`'s, in the same run, or kNil.
    Id before(Id node) const {
        const Id prev = nodes_[node].prev;
        return (prev & kEnd) != 0 ? kNil : prev;
    }
    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return runs_.capacity() * sizeof(Run); }

    void push_back(Id node) {  // used now
        const std::uint64_t kind = now_ << kClassBits | nodes_[node].reuse_class;
        if (runs_[newest_].kind != kind) open_run(kind);
        Run& run = runs_[newest_];
        auto& n = nodes_[node];
        n.next = kEnd | newest_;
        if (run.tail == kNil) {
            n.prev = kEnd | newest_;
            run.head = node;
        } else {
            n.prev = run.tail;
            nodes_[run.tail].next = node;
        }
        run.tail = node;
        ++size_;
    }
    void push_front(Id node);
    void remove(Id node);

    // Take the model's clock and scores. Returns true when the order of nodes has changed.
    bool choose(bool by_score);

  private:
    using RunId = std::uint32_t;
    static constexpr RunId kFront = 0;               // also: no run
    static constexpr std::uint32_t kEnd = 1u << 31;  // a link with this bit names a run

    static constexpr std::uint32_t kClassBits = 8;
    static constexpr std::uint32_t kCells = ReuseFeatures::kClasses * ReturnRates::kBuckets;
    using Cell = std::uint32_t;  // class * kBuckets + bucket
    static constexpr Cell kNoCell = kCells;

    struct Run {
        std::uint64_t kind = ~std::uint64_t{0};  // time of the model's clock, then the class
        Id head = kNil;
        Id tail = kNil;
        RunId older = kFront;  // in order of recency
        RunId newer = kFront;
        RunId older_of_class = kFront;
        RunId newer_of_class = kFront;
        Cell cell = kNoCell;

        std::uint64_t time() const { return kind >> kClassBits; }
        ReuseClass reuse_class() const { return static_cast<ReuseClass>(kind); }
    };
    struct Class {
        RunId newest = kFront;
        std::uint32_t buckets = 0;                          // bit: the bucket has a run
        std::array<RunId, ReturnRates::kBuckets> oldest{};  // by bucket
    };

    // Order of cells: the score, then the age.
    using Rank = std::pair<double, Cell>;

    static_assert(ReuseFeatures::kClasses <= 128);

    // The older cell is lower where scores are equal.
    Rank rank_of(std::uint32_t reuse_class, std::uint32_t bucket) const {
        return {model_->score(static_cast<ReuseClass>(reuse_class), bucket),
                (ReturnRates::kBuckets - bucket) * ReuseFeatures::kClasses + reuse_class};
    }
    Rank rank_of(Cell cell) const {
        return rank_of(cell / ReturnRates::kBuckets, cell % ReturnRates::kBuckets);
    }
    RunId oldest_in(Cell cell) const {
        return classes_[cell / ReturnRates::kBuckets].oldest[cell % ReturnRates::kBuckets];
    }
    Id head_of(RunId id) const { return id == kFront ? kNil : runs_[id].head; }
    RunId next_in_bucket(RunId id) const {
        const RunId next = runs_[id].newer_of_class;
        return next != kFront && runs_[next].cell == runs_[id].cell ? next : kFront;
    }
    void open_run(std::uint64_t kind);
    [[gnu::noinline]] void close_run(RunId id);  // keeps remove() short, which is called per block
    void enter_cell(RunId id, Cell cell);
    void leave_cell(RunId id);
    void choose_victim(Cell cell);
    Cell lowest_cell(Rank above) const;
    void age();

    Nodes& nodes_;
    const ReuseModel* model_;
    const std::uint32_t newest_bucket_;
    std::uint32_t size_ = 0;
    std::uint64_t now_ = 0;
    std::uint64_t epoch_ = 0;
    bool by_score_ = false;
    std::vector<Run> runs_;
    std::vector<RunId> free_;
    RunId oldest_ = kFront;
    RunId newest_ = kFront;
    std::vector<Class> classes_;
    std::array<std::uint64_t, 2> used_classes_{};  // bit: the class has a run
    Cell victim_ = kNoCell;      // the lowest cell, when it is known and has a run
    RunId victim_run_ = kFront;  // its oldest run
};

}  // namespace aiokv
