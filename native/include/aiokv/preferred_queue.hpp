// A policy's queue, and before and behind it the blocks that applications prefer to lose or keep.
//
// The parts of a queue, in the order of eviction:
//
//   demoted   runs of kDemotedLevel
//   normal    in the order of the policy
//   retained  a part per level of Levels: by priority, and then by the end of the retention
//   reserved  a part per salt with a share, at most as many blocks as the share, including deferred
//             ones; first that of the salt for which room is made, so that others keep
//             theirs
//
// Within a part other than the normal one, the least recently used run is evicted first. All runs
// are evictable: a part only decides about the order, so no grant waits for the end of a retention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "aiokv/eviction_order.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/ranked_queue.hpp"

namespace aiokv {

class Report;

// The levels of runs: one per pair of priority and end of retentions that have not ended.
class Levels {
  public:
    // Parts with lower ranks are evicted first.
    using Rank = std::uint64_t;
    static constexpr Rank kDemoted = 0;
    static constexpr Rank kNormal = 1;
    static constexpr Rank kRetained = Rank{1} << 56;

    // Returns the level of a priority and an end. Throws UsageError if there are too many.
    Level open(std::uint32_t priority, std::uint64_t end);
    // Makes the levels that end at `now` or before normal. Returns their former ranks.
    std::vector<Rank> end(std::uint64_t now);
    Rank rank(Level level) const { return ranks_[level]; }
    // Returns true if so many levels have ended that no run should have one: see recycle().
    bool should_recycle() const { return ended_.size() >= kMaxEnded; }
    // Call when no run has a level that has ended.
    void recycle();

  private:
    static constexpr std::size_t kMaxEnded = 256;

    std::vector<Rank> ranks_{kNormal, kDemoted};  // by level; kNormal if it has ended
    std::map<Rank, Level> open_;
    std::vector<Level> ended_;
    std::vector<Level> free_;
};

class PreferredQueue final : public TierQueue {
  public:
    using Rank = Levels::Rank;

    // `shares`: part of `blocks` per salt that has a share; Run::share counts from 1.
    PreferredQueue(PrefixTree& tree, const Levels& levels, TierQueue& normal,
                   const std::vector<double>& shares, std::uint32_t blocks)
        : tree_(tree),
          levels_(levels),
          normal_(normal),
          shares_(shares),
          blocks_(blocks),
          reserved_(shares.size()) {}

    RunId front() override { return parts_.empty() ? normal_.front() : first_from(0); }
    RunId after(RunId run) const override;
    RunId before(RunId run) const override { return queue_of(run).before(run); }
    void push_back(RunId run) override { enter(run).push_back(run); }
    // Takes out a run that will return to the front of its part, and that keeps its reservation.
    void defer(RunId run);
    void push_front(RunId run) override { part(key_of(tree_.runs()[run])).push_front(run); }
    // Call before a deferred run is used.
    void end_deferral(RunId run);
    void insert_before(RunId part, RunId run) override { queue_of(run).insert_before(part, run); }
    void insert_after(RunId part, RunId run) override { queue_of(run).insert_after(part, run); }
    void remove(RunId run) override { has_parts() ? remove_from_part(run) : normal_.remove(run); }
    void clear() override;
    // Call when a queued run has got, or has lost, so many blocks.
    void grow(RunId run, std::uint32_t blocks);
    void shrink(RunId run, std::uint32_t blocks);

    void resize(std::uint32_t blocks) { blocks_ = blocks; }
    std::size_t num_shares() const { return shares_.size(); }
    // Returns true if a run may be in another part than the normal one.
    bool has_parts() const { return !parts_.empty(); }
    // Returns the rank of the part of a queued run, or of the part that a run was deferred from.
    Rank rank_of(RunId run) const;
    // Returns the rank of the part that a run enters after its next use, for which room is made.
    Rank used_rank(RunId run) const {
        const Run& r = tree_.runs()[run];
        return r.share > 0 ? kServed : std::max(levels_.rank(r.level), Levels::kNormal);
    }
    // Makes room for a salt with this share, or, with 0, for others. Returns the share before.
    std::uint32_t serve(std::uint32_t share) { return std::exchange(served_, share); }
    // Number of reserved blocks of the salt beyond its share, after a change of their number.
    std::uint32_t excess_of(std::uint32_t share, std::int64_t change = 0) const;
    // Returns kNoRun if all reserved runs of the salt are deferred.
    RunId first_reserved(std::uint32_t share) const;
    // Moves a reserved run to the end of the part of its level.
    void end_reservation(RunId run);
    // Moves the runs of a level that has ended to the normal part.
    void end_level(Rank rank);
    // Calls `visit` with each retained run.
    template <class Visit>
    void for_each_retained(Visit visit) {
        for (auto& [rank, part] : parts_) {
            for (RunId run = part.front(); run != kNoRun; run = part.after(run)) {
                if (levels_.rank(tree_.runs()[run].level) > Levels::kNormal) visit(run);
            }
        }
    }

    // `reserved`: number of reserved blocks, including deferred ones, by share.
    void check(Report& report, const std::vector<std::uint32_t>& reserved) const;

  private:
    static constexpr Rank kServed = Rank{1} << 62;  // of the salt for which room is made
    static constexpr Rank kReservedPart = Rank{1} << 63;

    bool is_normal(const Run& run) const {
        return !run.has(kReserved) && levels_.rank(run.level) == Levels::kNormal;
    }
    Rank key_of(const Run& run) const {
        return run.has(kReserved) ? kReservedPart | run.share : levels_.rank(run.level);
    }
    TierQueue& queue_of(RunId run) const {
        const Run& r = tree_.runs()[run];
        return is_normal(r) ? normal_ : const_cast<RankedQueue&>(parts_.at(key_of(r)));
    }
    // Chooses the part of a run: that of its salt's share, or that of its level.
    TierQueue& enter(RunId run) {
        const Run& r = tree_.runs()[run];
        return r.share == 0 && r.level == kNormalLevel ? normal_ : enter_part(run);
    }
    TierQueue& enter_part(RunId run);
    void remove_from_part(RunId run);
    TierQueue& part(Rank key) {
        return key == Levels::kNormal ? normal_
                                      : parts_.try_emplace(key, tree_, nullptr).first->second;
    }
    void leave(Rank key);
    RunId first_from(Rank from) const;

    PrefixTree& tree_;
    const Levels& levels_;
    TierQueue& normal_;
    std::map<Rank, RankedQueue> parts_;  // all parts but the normal one; none is empty
    const std::vector<double> shares_;
    std::uint32_t blocks_;
    std::vector<std::uint32_t> reserved_;  // blocks, including deferred ones
    std::uint32_t served_ = 0;
};

}  // namespace aiokv
