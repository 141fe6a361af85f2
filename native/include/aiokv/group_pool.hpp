// The ids of a block group in one tier, attached to nodes of the index; of groups besides
// attention.
//
// A hit may end only where the model can continue from this pool: the first `head_blocks` and the
// last `tail_blocks` blocks of the hit must have an id each (all of them, of a shorter hit).
// Recurrent state needs the snapshot of one block; a sliding window, the blocks inside it and those
// of the attention sink.
//
//   free -> leased (the caller's) -> attached to a node -> idle, the next to be evicted -> free
//                                        read: by leases       least recently used first
//
// An id whose node has been dropped while leases read it is freed by the last reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/device_pool.hpp"
#include "aiokv/node.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Ownership;
class Report;

class GroupPool {
  public:
    GroupPool(std::uint32_t capacity, std::uint32_t tail_blocks, std::uint32_t head_blocks = 0);

    std::uint32_t capacity() const { return ids_.capacity(); }
    std::uint32_t tail_blocks() const { return tail_blocks_; }
    std::uint32_t head_blocks() const { return head_blocks_; }
    std::uint32_t free_ids() const { return ids_.free_blocks(); }
    std::uint32_t attached() const { return static_cast<std::uint32_t>(ids_of_.size()); }
    // Number of ids that take() can give: free ids, and ids that no lease reads.
    std::uint32_t room() const { return ids_.free_blocks() + idle_; }

    // Takes an id. Evicts an idle one if none is free, and then returns true. Requires room() > 0.
    bool take(BlockId& id);
    // Does the same as take(), but prefers an id that a transfer may write now.
    bool take_writable(BlockId& id);
    // Frees an id of the caller; `step` may still use it.
    void give_back(BlockId id, Step step);

    void attach(NodeId node, BlockId id);  // the caller's id; the node has none
    BlockId find(NodeId node) const;
    // Returns true if a hit may end behind the first `blocks` of the path. Ids in `copies` count,
    // too.
    bool covers(const PrefixTree& tree, std::span<const NodeId> path, std::size_t blocks,
                const GroupPool* copies = nullptr) const;
    bool is_idle(BlockId id) const { return entries_[at(id)].readers == 0; }
    // Call when the node was dropped. Returns true if it had an id.
    bool forget(NodeId node);
    void forget_all();  // forgets the ids of nodes; requires that no lease reads one
    // Takes an idle id from its node and gives it to the caller.
    void detach(BlockId id);

    void add_reader(BlockId id);
    void remove_reader(BlockId id);
    // Ends a read that does not count as a use: the id keeps its place in the order of eviction.
    // Requires note_uses() before the first use of an id.
    void remove_copier(BlockId id);
    void note_uses() { used_.resize(capacity(), 0); }
    void touch(BlockId id);  // marks the id as used now
    // Marks the ids that a hit of the whole path needs as used now. Skips missing ones.
    void touch_hit(std::span<const NodeId> path);

    void use_in(BlockId id, Step step) { ids_.use_in(id, step); }
    Step after_step(BlockId id) const { return ids_.after_step(id); }
    // Returns true if no open step uses the id, so that a transfer of the id has an event to wait
    // for.
    bool is_closed(BlockId id) const { return ids_.is_writable(id); }
    void close_step(Step step) { ids_.close_step(step); }
    void finish_step(Step step) { ids_.finish_step(step); }
    Step unfinished_step() const { return ids_.unfinished_step(); }

    // Returns true if take_writable() finds `count` ids for which keeps(id) is false.
    template <class Keeps>
    bool has_writable(std::size_t count, Keeps keeps) const {
        std::size_t found = ids_.writable_blocks();
        for (BlockId id = oldest_; id != kNoBlock && found < count; id = evicted_after(id)) {
            found += ids_.is_writable(id) && !keeps(id);
        }
        return found >= count;
    }

    // Iterate over idle ids in eviction order; kNoBlock is the end.
    BlockId first_evicted() const { return oldest_; }
    BlockId evicted_after(BlockId id) const { return entries_[at(id)].next; }

    // -- for checks
    bool is_free(BlockId id) const { return ids_.is_free(id); }
    bool is_attached(BlockId id) const { return entries_[at(id)].node != kNone; }
    std::uint32_t readers(BlockId id) const { return entries_[at(id)].readers; }
    // Returns true if neither a node nor another lease has the id.
    bool is_private(BlockId id) const {
        return !is_free(id) && !is_attached(id) && readers(id) == 0;
    }
    std::uint32_t idle() const { return idle_; }
    NodeId node_of(BlockId id) const { return entries_[at(id)].node; }
    // Compares the pool with its users. `ids`: owners other than nodes and readers. `readers`:
    // number of readers per id.
    void check(Report& report, Ownership ids, std::span<const std::uint32_t> readers,
               const PrefixTree& tree) const;

  private:
    struct Entry {
        NodeId node = kNone;
        std::uint32_t readers = 0;
        BlockId prev = kNoBlock;  // previous idle id, oldest first
        BlockId next = kNoBlock;
    };

    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }
    void note_use(BlockId id) {
        if (!used_.empty()) used_[at(id)] = ++clock_;
    }
    void link(BlockId id);
    void link_behind(BlockId id, BlockId before);
    void unlink(BlockId id);

    DevicePool ids_;
    std::uint32_t tail_blocks_;
    std::uint32_t head_blocks_;
    std::vector<Entry> entries_;  // by id
    std::unordered_map<NodeId, BlockId> ids_of_;
    BlockId oldest_ = kNoBlock;
    BlockId newest_ = kNoBlock;
    std::uint32_t idle_ = 0;
    std::vector<std::uint64_t> used_;  // by id: time of the last use; empty without note_uses()
    std::uint64_t clock_ = 0;
};

}  // namespace aiokv
