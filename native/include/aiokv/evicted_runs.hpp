// Runs of blocks that were evicted lately. Their slots keep the token ids until the slots are
// needed.
//
// The history explains misses: it knows which blocks a prompt would have hit, exactly, because
// token ids are compared, and why they have gone. No call of it depends on the number of tokens.
// When an evicted block is computed again, it gets its old slot back, so a prefix has one slot at
// most, and the runs below it stay below it.
//
// A block is evicted after the blocks below it, so the oldest run has no other run below it, and is
// forgotten first.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/eviction_cause.hpp"
#include "aiokv/node.hpp"

namespace aiokv {

struct Eviction {
    std::uint64_t at_ns = 0;   // tick_nanoseconds()
    std::uint64_t demand = 0;  // LeaseId that needed the room; 0: none
    EvictionCause cause = EvictionCause::kCapacity;
    bool from_host = false;  // true: the last copy was in host memory
};

class EvictedRuns {
  public:
    // Tag of the first run that is evicted below a block. Most blocks have one at most, so their
    // token ids need not be hashed.
    static constexpr std::uint32_t kFirst = 0;

    struct Run {
        NodeId first = kNone;
        std::uint32_t length = 0;
        NodeId parent = kNone;  // of the first block: in the tree, or in another run
        std::uint32_t tag = 0;  // of the token ids of the first block, or kFirst
        RunId next = kNoRun;    // in the bucket, or in the free list
        RunId older = kNoRun;
        RunId newer = kNoRun;
        Eviction eviction;

        bool contains(NodeId slot) const { return first <= slot && slot - first < length; }
    };

    // `limit`: most blocks in the history; 0 for none.
    explicit EvictedRuns(std::uint32_t limit)
        : limit_(limit), first_tokens_(limit > 0 ? 1 << kTokenBits : 0) {}

    std::uint32_t limit() const { return limit_; }
    std::uint32_t blocks() const { return blocks_; }
    // Returns true if a run below the block was evicted, even if the run is forgotten.
    bool is_above(NodeId slot) const { return slot < above_.size() && above_[slot]; }
    // Returns false if no prompt has begun with this token.
    bool may_begin_with(std::int32_t token) const { return first_tokens_[bit_of(token)]; }
    void note_first_token(std::int32_t token) {
        if (limit_ > 0) first_tokens_[bit_of(token)] = true;
    }
    bool is_below_root(NodeId root) const { return below_roots_.contains(root); }
    // Roots that no run is below any more, since the last call.
    std::vector<NodeId> take_bare_roots() { return std::exchange(bare_roots_, {}); }

    // Sets the reason of the evictions that follow.
    void begin_eviction(EvictionCause cause, std::uint64_t demand);
    // Gives all runs the reason that was set last. `moved`: new slots of blocks above them.
    void change_reasons(const std::unordered_map<NodeId, NodeId>& moved);
    void set_from_host(bool from_host) { reason_.from_host = from_host; }

    const Run& operator[](RunId id) const { return runs_[id]; }
    RunId oldest() const { return oldest_; }
    RunId newest() const { return newest_; }
    template <class Equal>
    RunId find(NodeId parent, std::uint32_t tag, Equal equal) const {
        if (blocks_ == 0) return kNoRun;
        for (RunId id = buckets_[bucket(parent, tag)]; id != kNoRun; id = runs_[id].next) {
            const Run& run = runs_[id];
            if (run.parent == parent && run.tag == tag && equal(run.first)) return id;
        }
        return kNoRun;
    }
    template <class Visit>
    void for_each(Visit visit) const {
        for (RunId id = oldest_; id != kNoRun; id = runs_[id].newer) visit(runs_[id]);
    }

    void add(NodeId first, std::uint32_t length, NodeId parent, bool is_root, std::uint32_t tag);
    // Removes the first `count` blocks of a run. `tag`: of the block behind them, if there is one.
    void take_front(RunId id, std::uint32_t count, std::uint32_t tag);
    void remove(RunId id) { take_front(id, runs_[id].length, 0); }
    void clear();
    // Call when slots get other token ids.
    void forget_children(NodeId first, std::uint32_t count);
    std::size_t bytes() const;

  private:
    static constexpr std::uint32_t kTokenBits = 18;
    static std::uint32_t bit_of(std::int32_t token) {
        return static_cast<std::uint32_t>(token) * 0x9e3779b1 >> (32 - kTokenBits);
    }
    std::size_t bucket(NodeId parent, std::uint32_t tag) const {
        const std::uint64_t key = (std::uint64_t{parent} << 32 | tag) * 0x9e3779b97f4a7c15;
        return (key >> 32) & (buckets_.size() - 1);
    }
    void link(RunId id);
    void unlink(RunId id);
    void grow();
    void note_above(NodeId slot);
    void leave_root(NodeId parent);

    std::uint32_t limit_;
    std::uint32_t blocks_ = 0;
    std::uint32_t used_ = 0;  // runs
    Eviction reason_;
    std::vector<Run> runs_;
    RunId free_ = kNoRun;
    RunId oldest_ = kNoRun;
    RunId newest_ = kNoRun;
    std::vector<RunId> buckets_;                             // their number is a power of two
    std::vector<bool> above_;                                // by slot
    std::vector<bool> first_tokens_;                         // of prompts, by bit_of()
    std::unordered_map<NodeId, std::uint32_t> below_roots_;  // number of runs by root
    std::vector<NodeId> bare_roots_;
};

// Why blocks of a prompt were not hit.
enum class MissCause : std::uint8_t {
    kNeverSeen,     // no known prefix continues here
    kDiverged,      // known prefixes continue with other tokens
    kEvicted,       // see `eviction`
    kOtherWeights,  // cached before the last change of the weights
    kOtherContext,  // cached for another salt or adapter
    kOtherItems,    // cached with other items, or behind such blocks
    kPending,       // another lease is computing them
    kInStore,       // a store has them; see `left`
    kUnusable,      // cached, but a hit cannot have them
};
constexpr std::size_t kMissCauses = 9;

// Why blocks that a store has were not fetched.
enum class StoreMiss : std::uint8_t {
    kDeclined,  // expected to take longer than to compute them, or the host has no room
    kLate,
    kFailed,
};

struct MissedRun {
    std::uint32_t first = 0;  // block of the prompt
    std::uint32_t end = 0;
    MissCause cause = MissCause::kNeverSeen;
    Eviction eviction = {};               // kEvicted
    std::uint64_t owner = 0;              // kPending: LeaseId
    StoreMiss left = StoreMiss::kFailed;  // kInStore
    NodeId other_root = kNone;            // kOtherContext
    NodeId known = kNone;                 // kDiverged: the last known block, or the root
};

// Tokens by cause.
using MissCounts = std::array<std::uint64_t, kMissCauses>;

}  // namespace aiokv
