// The shape of the prefix index: blocks, their token ids, and how a child is found.
//
// Each block has a slot, and its NodeId is the number of that slot. Consecutive slots with the same
// state form a run; see Run. Within a run, the only child of a block is in the next slot, so a path
// is found by comparing token ids of consecutive slots, and an operation on a path costs time per
// run, not per block. A commit takes consecutive slots where it can. A run is split when only a
// part of it changes; two runs that become neighbours in an eviction queue are joined.
//
// A child is found by a hash of its token ids and confirmed by comparing them, so no hash collision
// can return another block. Most blocks have one child, which is compared directly; only the
// children of a fork are hashed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "aiokv/evicted_runs.hpp"
#include "aiokv/item_keys.hpp"
#include "aiokv/node.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

// The children of one fork, in open addressing with 32-bit tags of their token ids. The slots of a
// small set are in the set itself: most forks have two children, and are read in one cache line. A
// large set is divided by the highest byte of the tags, so that an insertion rehashes one part of
// it at most.
class alignas(64) ChildSet {
  public:
    struct Slot {
        NodeId node = kNone;
        std::uint32_t tag = 0;
    };

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const;

    template <class Equal>
    NodeId find(std::uint32_t tag, Equal equal) const {
        if (parts_) return parts_[tag >> kPartShift].find(tag, equal);
        const Slot* slots = this->slots().data();
        for (std::size_t i = tag & mask();; i = (i + 1) & mask()) {
            const Slot& slot = slots[i];
            if (slot.node == kNone) return kNone;
            if (slot.tag == tag && equal(slot.node)) return slot.node;
        }
    }
    // Inserts a child. Returns the number of bytes by which the set has grown.
    std::size_t insert(std::uint32_t tag, NodeId node) { return insert(tag, node, kMaxSlots); }
    void erase(std::uint32_t tag, NodeId node);
    void clear();

    template <class Visit>
    void for_each(Visit visit) const {
        for (std::size_t i = 0; parts_ && i < kParts; ++i) parts_[i].for_each(visit);
        for (const Slot& slot : slots()) {
            if (slot.node != kNone) visit(slot.node);
        }
    }

    // Visits children until `max_slots` slots were examined. Returns the number of examined slots.
    template <class Visit>
    std::size_t for_some(std::size_t max_slots, Visit visit) const {
        std::size_t seen = 0;
        for (std::size_t i = 0; parts_ && i < kParts && seen < max_slots; ++i) {
            seen += parts_[i].for_some(max_slots - seen, visit);
        }
        for (const Slot& slot : slots()) {
            if (seen == max_slots) break;
            ++seen;
            if (slot.node != kNone) visit(slot.node);
        }
        return seen;
    }

    std::uint32_t device_children = 0;

  private:
    static constexpr std::size_t kMaxSlots = 1 << 13;
    static constexpr std::uint32_t kPartShift = 24;
    static constexpr std::size_t kParts = 1 << (32 - kPartShift);

    std::size_t mask() const { return capacity_ - 1; }
    std::span<const Slot> slots() const { return {more_ ? more_.get() : few_.data(), capacity_}; }
    std::span<Slot> slots() { return {more_ ? more_.get() : few_.data(), capacity_}; }
    void place(Slot slot);
    std::size_t insert(std::uint32_t tag, NodeId node, std::size_t max_slots);
    std::size_t grow(std::size_t max_slots);

    std::uint32_t size_ = 0;
    std::array<Slot, 4> few_;
    std::uint32_t capacity_ = 4;         // number of slots; a power of two, or 0 in a divided set
    std::unique_ptr<Slot[]> more_;       // the slots, if they are more than those of few_
    std::unique_ptr<ChildSet[]> parts_;  // null until the set is divided
};

static_assert(sizeof(ChildSet) == 64);

class Report;

// An object to notify when a queued run is split.
class SplitListener {
  public:
    virtual ~SplitListener() = default;
    // Call after the split: run `made` now has the blocks of `split` above, or below, the point of
    // division.
    virtual void on_split(RunId split, RunId made, bool made_is_above) = 0;
};

class PrefixTree {
  public:
    static constexpr std::uint32_t kFork = 0x80000000;

    // `history_blocks`: most evicted blocks that EvictedRuns remembers.
    PrefixTree(std::uint32_t block_tokens, std::size_t expected_nodes, std::size_t populated_nodes,
               std::uint32_t history_blocks = 0);

    Node& operator[](NodeId id) { return nodes_[id]; }
    const Node& operator[](NodeId id) const { return nodes_[id]; }
    const std::int32_t* tokens(NodeId id) const { return &tokens_[std::size_t{id} * stride_]; }

    // -- runs
    RunId run_of(NodeId node) const { return run_of_[node]; }
    Slab<Run>& runs() { return runs_; }
    const Slab<Run>& runs() const { return runs_; }
    // Returns the run of a block.
    const Run& run(NodeId node) const { return runs_[run_of_[node]]; }
    Run& run(NodeId node) { return runs_[run_of_[node]]; }
    std::uint32_t refs(NodeId node) const { return run(node).refs; }
    NodeId last_of(RunId run) const { return run == kNoRun ? kNone : runs_[run].last(); }
    void listen(SplitListener& listener) { listener_ = &listener; }

    // Split the run of a block, so that a run begins with the block, ends with it, or has only this
    // block. Return that run.
    RunId split_before(NodeId node) {
        const RunId run = run_of_[node];
        return runs_[run].first == node ? run : split(run, node);
    }
    RunId split_after(NodeId node) {
        const RunId run = run_of_[node];
        if (runs_[run].last() != node) split(run, node + 1);
        return run_of_[node];
    }
    RunId isolate(NodeId node) {
        split_before(node);
        return split_after(node);
    }
    // Returns true if the blocks of `above` and `below` could form one run.
    bool continues(RunId above, RunId below) const {
        const Run& a = runs_[above];
        const Run& b = runs_[below];
        return a.last() + 1 == b.first && a.child == b.first && a.refs == b.refs &&
               a.reuse_class == b.reuse_class && a.level == b.level;
    }
    // Joins two runs into `keep`, which is one of them. Requires continues(), and that the other
    // one is in no queue.
    void join(RunId above, RunId below, RunId keep);

    // Calls visit(run, part of the path) for each run of the path, after splitting the first run
    // before the path and the last one behind it. `visit` may split the run further.
    template <class Visit>
    void for_each_run(std::span<const NodeId> path, Visit visit) {
        if (path.empty()) return;
        split_before(path.front());
        split_after(path.back());
        while (!path.empty()) {
            const RunId id = run_of_[path.front()];
            const std::size_t length = runs_[id].length;
            if (length == 1) {  // the processor goes on before it has read the length
                visit(id, path.first(1));
                path = path.subspan(1);
                continue;
            }
            visit(id, path.first(length));
            path = path.subspan(length);
        }
    }
    // Does the same as for_each_run(), the deepest run first.
    template <class Visit>
    void for_each_run_upwards(std::span<const NodeId> path, Visit visit) {
        if (path.empty()) return;
        split_before(path.front());
        split_after(path.back());
        while (!path.empty()) {
            const RunId id = run_of_[path.back()];
            const std::size_t length = runs_[id].length;
            if (length == 1) {
                visit(id, path.last(1));
                path = path.first(path.size() - 1);
                continue;
            }
            visit(id, path.last(length));
            path = path.first(path.size() - length);
        }
    }
    // Returns the leading blocks of a path that are in one run.
    std::span<const NodeId> first_part(std::span<const NodeId> path) const {
        const std::size_t blocks = run(path.front()).last() - path.front() + 1;
        if (blocks == 1) return path.first(1);
        return path.first(std::min(blocks, path.size()));
    }
    // Returns how many blocks of a path have one of these flags. kDeviceValid must be among them.
    std::uint32_t count_on_device(std::span<const NodeId> path, std::uint16_t flags) const {
        std::uint32_t count = 0;
        while (!path.empty()) {
            const auto part = first_part(path);
            count += count_on_device(run(part.front()), part, flags);
            path = path.subspan(part.size());
        }
        return count;
    }
    // Does the same for a part of a run.
    std::uint32_t count_on_device(const Run& run, std::span<const NodeId> part,
                                  std::uint16_t flags) const {
        if (run.has(kOnDevice)) return static_cast<std::uint32_t>(part.size());
        std::uint32_t count = 0;
        for (const NodeId node : part) count += nodes_[node].has(flags);
        return count;
    }
    // Sets the class of the blocks of a path. None of them may be queued.
    void classify(std::span<const NodeId> path, ReuseClass reuse_class);

    // -- shape
    // `share`: Run::share of all blocks below the root.
    NodeId add_root(std::uint32_t share = 0);
    NodeId find_child(NodeId parent, const std::int32_t* tokens, ItemKey items = kNoItems) const;
    struct FoundPath {
        std::size_t blocks = 0;
        std::uint32_t on_device = 0;  // how many of them have kDeviceValid
    };
    // Appends to `path` the leading blocks below `above` that hold these tokens and items and are
    // in the tree; at most `limit`.
    FoundPath find_path(NodeId above, const std::int32_t* tokens, std::span<const ItemKey> items,
                        std::size_t limit, std::vector<NodeId>& path) const;
    // Adds `count` blocks below `parent`, each the child of the one before it, and appends them to
    // `path`. `parent` must not have a child with the first tokens and items.
    void add_chain(NodeId parent, const std::int32_t* tokens, std::span<const ItemKey> items,
                   std::size_t count, std::vector<NodeId>& path);
    // Appends the `count` blocks below `above` with these tokens and items to `path`. Adds the
    // missing ones to the tree. Returns how many leading ones it has found.
    std::size_t find_or_add_path(NodeId above, const std::int32_t* tokens,
                                 std::span<const ItemKey> items, std::size_t count,
                                 std::vector<NodeId>& path);
    ItemKey items(NodeId node) const {
        return nodes_[node].has(kHasItems) ? item_keys_.of(node) : kNoItems;
    }
    ItemKeys& item_keys() { return item_keys_; }
    const ItemKeys& item_keys() const { return item_keys_; }

    NodeId parent(NodeId node) const {
        const Run& run = this->run(node);
        return run.first == node ? run.parent : node - 1;
    }
    // Fetches what unlink() reads of a node. Call some time before it.
    void prefetch_tag(NodeId node) const { __builtin_prefetch(tokens(node)); }
    // Removes the node from the children of its parent. Its own children stay below it. Returns its
    // tag if that was computed, or 0.
    std::uint32_t unlink(NodeId node);
    // Forgets the children of a node. The node is or becomes detached, and so do the children.
    void forget_children(NodeId node);
    // `evicted_from`: its former parent, if the history shall remember the block.
    void free(NodeId node, NodeId evicted_from = kNone);
    // Frees all blocks of a run. They are detached, and their children are or become detached.
    // `keeps_slots`: the caller will retire() them.
    void free_run(RunId id, bool keeps_slots = false);
    // Frees all blocks except the roots and those of the runs in `kept`, without access to them.
    // They must be in no queue, and the kept ones detached.
    void clear(std::span<const NodeId> roots, std::span<const RunId> kept);
    // Frees the last `count` blocks of a run that has no children. The history remembers them.
    void trim(RunId id, std::uint32_t count);

    // -- history
    EvictedRuns& evicted() { return evicted_; }
    const EvictedRuns& evicted() const { return evicted_; }
    void forget_history();
    // Moves blocks that have left the tree to the history, or frees them without one. They have
    // consecutive slots, each block the child of the one before it. `hash`: tag(first), or 0.
    void retire(NodeId first, std::uint32_t count, NodeId parent, std::uint32_t hash = 0);
    // Copies token ids and items of the first blocks, at least one, to slots that the caller will
    // retire(). Returns these.
    BlockPool::Extent copy_slots(NodeId first, std::uint32_t count);
    // An evicted run whose leading blocks hold the requested tokens.
    struct EvictedPart {
        RunId run = kNoRun;
        std::uint32_t blocks = 0;
    };
    // Finds a run below `parent`, which is in the tree or was evicted. At most `limit` blocks.
    EvictedPart find_evicted(NodeId parent, const std::int32_t* tokens,
                             std::span<const ItemKey> items, std::size_t limit) const;

    // Call when kDeviceResident of a block changes. Only the first block of a run can have
    // siblings, so others are not counted.
    void count_device_child(NodeId node, int change) {
        const Run& run = this->run(node);
        if (run.first != node || run.parent == kNone) return;
        const std::uint32_t child = this->run(run.parent).child;
        if (is_fork(child)) fork(child).device_children += static_cast<unsigned>(change);
    }
    bool has_device_child(NodeId node) const { return device_children(node) > 0; }
    std::uint32_t device_children(NodeId node) const {
        const std::uint32_t child = child_of(node);
        if (child == kNone) return 0;
        return is_fork(child) ? fork(child).device_children : nodes_[child].has(kDeviceResident);
    }
    std::uint32_t children(NodeId node) const {
        const std::uint32_t child = child_of(node);
        return is_fork(child) ? fork(child).size() : child != kNone;
    }
    bool has_child(NodeId node) const { return child_of(node) != kNone; }
    // Returns the only child, or kNone if there is none or several.
    NodeId only_child(NodeId node) const {
        const std::uint32_t child = child_of(node);
        return is_fork(child) ? kNone : child;
    }

    template <class Visit>
    void for_each_child(NodeId node, Visit visit) const {
        const std::uint32_t child = child_of(node);
        if (child == kNone) return;
        if ((child & kFork) == 0) return visit(child);
        fork(child).for_each(visit);
    }

    // Does the same as for_each_child(), but examines at most `max_slots` slots. Returns the number
    // of examined slots.
    template <class Visit>
    std::size_t for_some_children(NodeId node, std::size_t max_slots, Visit visit) const {
        const std::uint32_t child = child_of(node);
        if (child == kNone || max_slots == 0) return 0;
        if ((child & kFork) != 0) return fork(child).for_some(max_slots, visit);
        visit(child);
        return 1;
    }

    std::uint32_t live_nodes() const { return live_; }
    // Returns the first id that was never used: a scan of all nodes ends before it.
    NodeId end_id() const { return static_cast<NodeId>(nodes_.size()); }
    // A slot that is free or evicted keeps the id of a run that does not have it.
    bool is_live(NodeId node) const {
        const RunId id = run_of_[node];
        return id < runs_.size() && runs_[id].first <= node && node <= runs_[id].last();
    }
    std::size_t node_bytes() const {
        return nodes_.bytes() + run_of_.bytes() + runs_.bytes() + free_slots_.bytes() +
               evicted_.bytes();
    }
    std::size_t fork_bytes() const;
    std::size_t token_bytes() const { return tokens_.bytes(); }
    void check(Report& report) const;

  private:
    static constexpr std::uint32_t kForks = 64;  // in a chunk of forks_
    static constexpr std::uint32_t kMaxChunks = kFork / kForks;

    static bool is_fork(std::uint32_t child) { return child != kNone && (child & kFork) != 0; }
    // A detached block has no children, although its run may go on.
    std::uint32_t child_of(NodeId node) const {
        const Run& run = this->run(node);
        if (run.last() == node) return run.child;
        return nodes_[node].has(kDetached) ? kNone : node + 1;
    }
    BlockPool::Extent take_slots(std::size_t count);
    void free_slots(NodeId first, std::uint32_t count);
    // Returns the tag of an evicted run that begins with `node`. `hash`: tag(node), or 0.
    std::uint32_t evicted_tag(NodeId node, NodeId parent, std::uint32_t hash = 0) const;
    void forget_evicted(RunId id);
    void forget_orphans();
    BlockPool::Extent revive(NodeId parent, const std::int32_t* tokens,
                             std::span<const ItemKey> items, std::size_t count);
    RunId open_run(NodeId first, std::uint32_t length, NodeId parent);
    void close_run(RunId id);
    RunId split(RunId id, NodeId lower);
    void label(RunId id);

    ChildSet& fork(std::uint32_t child) {
        return forks_[child / kForks % kMaxChunks][child % kForks];
    }
    const ChildSet& fork(std::uint32_t child) const {
        return forks_[child / kForks % kMaxChunks][child % kForks];
    }
    std::uint32_t new_fork(NodeId only_child);
    void free_fork(std::uint32_t child);
    void clear_fork(ChildSet& fork);
    std::uint32_t tag(const std::int32_t* tokens, ItemKey items) const;
    std::uint32_t tag(NodeId node) const { return tag(tokens(node), items(node)); }
    void link(NodeId node, const std::int32_t* tokens);
    bool equal(NodeId node, const std::int32_t* tokens, ItemKey items) const {
        if (!equal_tokens(node, tokens)) return false;
        return item_keys_.nodes() == 0 ? items == kNoItems : this->items(node) == items;
    }
    NodeId find_in(std::uint32_t child, const std::int32_t* tokens, ItemKey items) const;
    // With a constant size, the compiler can inline memcmp.
    bool equal_tokens(NodeId node, const std::int32_t* tokens) const {
        if (stride_ == 16) return std::memcmp(this->tokens(node), tokens, 64) == 0;
        return std::memcmp(this->tokens(node), tokens, stride_ * sizeof(std::int32_t)) == 0;
    }
    std::size_t equal_blocks(NodeId first, const std::int32_t* tokens,
                             std::span<const ItemKey> items, std::size_t count) const;

    std::size_t stride_;
    Slab<Node> nodes_;  // the next two are also indexed by slot
    Slab<std::int32_t> tokens_;
    Slab<RunId> run_of_;  // see is_live()
    BlockPool free_slots_{0};
    Slab<Run> runs_;
    RunId free_run_ = kNoRun;
    SplitListener* listener_ = nullptr;
    std::vector<std::unique_ptr<ChildSet[]>> forks_;  // chunks, which do not move
    std::uint32_t end_fork_ = 0;                      // first fork that was never used
    std::vector<std::uint32_t> free_forks_;
    std::size_t child_bytes_ = 0;  // memory of the tables of all forks
    ItemKeys item_keys_;
    std::uint32_t live_ = 0;
    EvictedRuns evicted_;
    bool has_orphans_ = false;  // blocks above evicted runs may have been freed
};

}  // namespace aiokv
