// The nodes that may be evicted from one tier, in the order in which they should be evicted.
//
// One list in order of recency, cut into runs: nodes of one reuse class that were pushed one after
// the other. Eviction by recency follows the list. Eviction by score takes the oldest run of the
// *cell* (class and bucket of age) with the lowest score. Both orders are there at any time, so
// choose() costs the same however many nodes there are. Without a model, all nodes are one run.
// A node that was blocked when its turn came returns to the front, before all runs.
//
// The links are in the nodes. The outer links of a run's first and last node name the run, so that
// a node is taken out in O(1).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "aiokv/reuse_model.hpp"

namespace aiokv {

enum class EvictionKind : std::uint8_t { kLru, kAdaptive };

// `Nodes`: node = nodes[id] has the links `prev` and `next`, and a `reuse_class`.
template <class Nodes>
class EvictionQueue {
  public:
    using Id = std::uint32_t;
    static constexpr Id kNil = 0xffffffff;

    // Without a model the order is that of push_back.
    EvictionQueue(Nodes& nodes, const ReuseModel* model);

    Id front();
    // The node whose turn is after `node`'s, or kNil; for looking ahead.
    Id after(Id node) const;
    // The node whose turn is before `node`'s, in the same run, or kNil.
    Id before(Id node) const {
        const Id prev = nodes_[node].prev;
        return (prev & kEnd) != 0 ? kNil : prev;
    }
    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return runs_.capacity() * sizeof(Run); }

    void push_back(Id node) {  // used now
        const ReuseClass reuse_class = nodes_[node].reuse_class;
        const Run& newest = runs_[newest_];
        if (newest_ == kFront || newest.reuse_class != reuse_class || newest.time != now_) {
            open_run(reuse_class);
        }
        link_back(newest_, node);
    }
    void push_front(Id node);
    void remove(Id node);

    // Take the model's clock and scores. Returns true when the order of nodes has changed.
    bool choose(bool by_score);

  private:
    using RunId = std::uint32_t;
    static constexpr RunId kFront = 0;               // also: no run
    static constexpr std::uint32_t kEnd = 1u << 31;  // a link with this bit names a run

    struct Run {
        Id head = kNil;
        Id tail = kNil;
        RunId older = kFront;  // in order of recency
        RunId newer = kFront;
        RunId older_of_class = kFront;
        RunId newer_of_class = kFront;
        std::uint32_t time = 0;  // of the model's clock
        ReuseClass reuse_class = 0;
        std::uint8_t bucket = 0;  // of its age
    };
    struct Class {
        RunId newest = kFront;
        std::uint32_t place = 0;                            // in order_, of its newest cell
        std::array<RunId, ReturnRates::kBuckets> oldest{};  // by bucket
    };
    struct Cell {
        double score;
        ReuseClass reuse_class;
        std::uint8_t bucket;
    };

    RunId oldest_of(const Cell& cell) const {
        return classes_[cell.reuse_class].oldest[cell.bucket];
    }
    Id head_of(RunId id) const { return id == kFront ? kNil : runs_[id].head; }
    RunId next_in_bucket(RunId id) const {
        const RunId next = runs_[id].newer_of_class;
        return next != kFront && runs_[next].bucket == runs_[id].bucket ? next : kFront;
    }
    void link_back(RunId id, Id node) {
        Run& run = runs_[id];
        auto& n = nodes_[node];
        n.next = kEnd | id;
        if (run.tail == kNil) {
            n.prev = kEnd | id;
            run.head = node;
        } else {
            n.prev = run.tail;
            nodes_[run.tail].next = node;
        }
        run.tail = node;
        ++size_;
    }
    void open_run(ReuseClass reuse_class);
    void close_run(RunId id);
    RunId run_from(std::size_t place) const;
    void age();
    void sort();

    Nodes& nodes_;
    const ReuseModel* model_;
    const std::uint8_t newest_bucket_;
    std::uint32_t size_ = 0;
    std::uint32_t now_ = 0;
    std::uint64_t epoch_ = 0;
    bool by_score_ = false;
    std::vector<Run> runs_;
    std::vector<RunId> free_;
    RunId oldest_ = kFront;
    RunId newest_ = kFront;
    std::vector<Class> classes_;
    std::vector<Cell> order_;  // the lowest score first
    std::size_t cursor_ = 0;   // no cell of order_ before it has a node
};

}  // namespace aiokv
