// Copies of indexed blocks on device and host: refs, holds and pins on them, and eviction.
//
//   ref    of a granted lease, on each node of its path: the block is not evicted
//   hold   of a swapped lease, on each node of its path, of a fetch, on the node above its blocks,
//          and of a save, on its nodes: the host copy is not evicted
//   pin    of a transfer between the tiers that reads or writes one of the copies
//
// A *dirty* block is on the device only; a *clean* one has a host copy too, so that its device copy
// can be evicted without another copy. The host copy of a clean block can be reclaimed: its bytes
// are on the device.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/block_events.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/evictable_blocks.hpp"
#include "aiokv/eviction_cause.hpp"
#include "aiokv/host_copy_list.hpp"
#include "aiokv/index.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/stored_blocks.hpp"

namespace aiokv {

class Residency {
  public:
    // Treatment of blocks that only the device has while the host could take them: eviction stops
    // before them (kKept), or drops them (kDropped).
    enum class Unsaved : std::uint8_t { kKept, kDropped };

    Residency(const CoreConfig& config, Index& index, StoredBlocks& stored,
              AuxiliaryGroups& auxiliary, DevicePool& device, RunPool& host, BlockEvents& events);

    // -- refs and holds, a path at a time
    // Takes refs on a path. Returns the number of its blocks that are on the device or being
    // loaded.
    std::uint32_t ref(std::span<const NodeId> path);
    // Drops the refs on a path, deepest block first, so that a child is evicted before its parent.
    void unref(std::span<const NodeId> path);
    void hold(std::span<const NodeId> path);
    void unhold(std::span<const NodeId> path);
    // Marks a path, which begins at the root, as used now: blocks that wait for eviction move to
    // the end of their queue.
    void touch(std::span<const NodeId> path) { evictable_.touch(path); }
    // Call at the first grant of a lease. Reports its prompt and its hit to the eviction policy.
    void on_grant(Lease& lease) { evictable_.on_grant(lease, index_.seed_of(lease)); }

    // Call when a lease is released with a label. Reports it to the eviction policy.
    void on_label(Lease& lease, std::string_view label) {
        evictable_.on_label(lease, index_.seed_of(lease), label);
    }

    // -- preferences of applications; see PreferredQueue. Paths begin below a root.
    void retain(std::span<const NodeId> path, std::uint32_t priority, std::uint64_t end) {
        evictable_.retain(path, priority, end);
    }
    // Evicts the last blocks of a path first, or drops them: those that nothing else shares and
    // nothing uses. Returns their number.
    std::uint32_t demote(std::span<const NodeId> path);
    std::uint32_t forget(std::span<const NodeId> path);
    // Evicts the copies of a path before all others, because another cache has its blocks: from the
    // last block up to one that is in use. A block with other children is evicted after all blocks
    // below these, and ends the path here if those are more than the blocks that become evictable
    // with it.
    void evict_first(std::span<const NodeId> path);
    void end_retentions(std::uint64_t now) { evictable_.end_retentions(now); }
    // Makes room for a lease from now on: the share of its salt is used up before other shares.
    void serve(const Lease& lease) { evictable_.serve(share_of(lease)); }
    std::uint32_t share_of(const Lease& lease) const {
        return tree_.run(index_.root_of(lease)).share;
    }
    // Returns the number of retained blocks that no lease uses, by context.
    std::map<std::string, std::uint32_t> retained_blocks();

    // -- the blocks of a lease
    // The lease has computed the blocks of its path from `first` on, and gets refs on them. Those
    // from `added` on are new in the tree. Calls taken(id, node) for each of them that had no
    // device copy and has taken the lease's, which is a use of the block. Returns their number.
    template <class Taken>
    std::uint32_t publish(const Lease& lease, std::size_t first, std::size_t added, Taken taken);
    // Call when the lease uses these blocks, of which `first` is the number of the first one and
    // which it has computed.
    void note_use(const Lease& lease, std::uint32_t first, std::span<const NodeId> nodes) {
        evictable_.classify(lease, first, nodes);
        for (const NodeId node : nodes) tree_[node].count_use();
    }
    // Gives the lease its blocks of dropped nodes back. Returns false, changing nothing, while
    // another lease or a transfer still uses such a node.
    bool reclaim_detached(Lease& lease);
    // Frees the table, which `step` may still use, and drops the refs on the path.
    void free_table(Lease& lease, Step step);
    void free_host(std::span<const BlockId> ids);

    // -- device room; see residency.cpp
    std::uint32_t evictable() const { return evictable_.evictable_device(); }
    // Number of free or evictable blocks: an upper limit of the room that can be made now.
    std::uint32_t device_room() const { return device_.free_blocks() + evictable(); }
    // `demand`: the lease that needs the room, for the history of evictions; 0 for none.
    bool make_room(std::uint32_t blocks, Unsaved unsaved = Unsaved::kKept, LeaseId demand = 0);
    // Returns true if the last make_room() stopped at a block that has to be saved first.
    bool stopped_at_unsaved() const { return stopped_at_unsaved_; }
    // Evicts up to `blocks` blocks; stops at a block that has to be saved first. See Saver.
    std::uint32_t evict_device(std::uint32_t blocks);
    std::uint32_t evict_host(std::uint32_t blocks);
    class Forecast;  // forecasts make_room(); see residency_forecast.hpp

    // -- host room; see residency_host.cpp
    // Keeps as many of the nodes as get a host copy before they come near eviction. A full host
    // keeps what it has: the copy of a block that the device evicts last is worth least. Only
    // blocks that stores wait for replace others: first host copies of clean blocks that wait for
    // no save, so that few host blocks serve all of them.
    void fit_early_copies(std::vector<NodeId>& nodes);
    struct Ahead {
        std::vector<NodeId> unsaved;    // will be evicted next and can be saved now, oldest first
        bool passed_open_step = false;  // true if blocks of the open step were passed
    };
    // Continues where the last call stopped, until `target` blocks are free, clean or in `unsaved`.
    // With kKept, it stops before blocks that cannot be saved until the step is closed.
    Ahead look_ahead(std::uint32_t target, Unsaved unsaved);
    std::uint32_t clean_ahead() const { return evictable_.ahead().count(); }
    void restart_look_ahead() { evictable_.ahead().restart(); }
    // Evicts until `blocks` host ids are free, as far as possible: first host copies of clean
    // blocks down to the low watermark, those first that the device evicts last; then blocks on the
    // host alone; then the other host copies of clean blocks. Those of the next `near_blocks` of
    // the device queue stay, and those of deferred blocks: their device copies are evicted next.
    void make_host_room(std::size_t blocks, std::uint32_t near_blocks);
    bool could_make_host_room(std::size_t blocks) const;
    // Like make_host_room(), but evicts only blocks that are on the host alone.
    void evict_host_until_free(std::size_t blocks);

    // -- transfers; see residency_transfers.cpp
    // The newest unfinished step that uses one of these device blocks, or 0.
    Step after_step(std::span<const BlockId> device_blocks) const;
    void begin_onload(const Transfer& transfer);
    // Ends an onload. The first `good` blocks have arrived; drops the others.
    void finish_onload(const Transfer& transfer, std::uint32_t good);
    void cancel_onload(const Transfer& transfer);
    // Drops a held node whose host copy is wrong, and all nodes below it. Idempotent.
    void lose_host_copy(NodeId node) {
        if (tree_[node].has(kDetached)) return;
        begin_eviction(EvictionCause::kFailure);
        drop(node);
        count_as(EvictionCause::kFailure);
    }
    void begin_offload(const Transfer& transfer);
    void finish_offload(const Transfer& transfer, std::uint32_t good);

    // -- transfers of the stores; see residency_stores.cpp
    // The host ids of a fetch, as far as there is room: it comes from blocks on the host alone
    // first, then from host copies of clean blocks. The fetch owns them.
    std::vector<BlockId> take_fetch_room(std::size_t blocks);
    // Gives a node the host copy that was fetched for it. Returns false, changing nothing, if the
    // node has a host copy or a transfer is writing one.
    bool give_host_copy(NodeId node, BlockId host);
    // Gives new nodes, in path order, the class of the node above them.
    void inherit_class(std::span<const NodeId> nodes);
    // Makes new nodes, in path order, evictable.
    void enqueue_fetched(std::span<const NodeId> nodes);
    void begin_save(std::span<const NodeId> nodes);
    void finish_save(std::span<const NodeId> nodes);
    // Returns the next `blocks` victims of the host queue, in order.
    std::vector<NodeId> next_on_host(std::size_t blocks);

    // -- whole tiers; see residency_tiers.cpp
    // Evicts all device blocks. Requires that no lease and no transfer needs one.
    void forget_device() { evict(beyond_device(0), EvictionCause::kSleep); }
    // Evicts all host blocks. Requires that no lease and no transfer needs one.
    void forget_host();
    // Makes all blocks unmatchable.
    void detach_all(bool new_weights);
    // Makes all blocks of a context unmatchable.
    void drop_context(NodeId root);
    // Evicts blocks beyond the new size, and those below them in the tree, from the device; blocks
    // without a host copy are dropped. Throws UsageError, changing nothing, if one of them is
    // leased, being copied, or used by an unfinished step.
    void resize_device(std::uint32_t blocks);

    // Sets flags of the stores.
    void set_store_flags(NodeId node, std::uint8_t flags) {
        stored_.set(node, flags);
        if ((flags & kStored) != 0) events_.changed(node);
    }

    std::uint64_t evicted_unsaved() const { return evicted_unsaved_; }
    void add_to(CoreStatistics& statistics) const;
    // Call last: compares the block owners with those that other parts reported.
    void check(Report& report) const;

  private:
    // Only these functions, and publish(), change kDeviceValid and kHostValid of indexed blocks,
    // because subscribers are told of each change.
    void gain(NodeId node, NodeFlag copy) {
        tree_[node].set(copy);
        events_.changed(node);
    }
    void lose(NodeId node, NodeFlag copy) {
        tree_[node].clear(copy);
        if (copy == kDeviceValid) tree_.run(node).clear(kOnDevice);
        events_.changed(node);
    }

    // refs and holds
    std::span<const NodeId> unshared(std::span<const NodeId> path) const;
    bool may_evict_first(NodeId node) const;
    bool list_below(NodeId top, NodeId except, std::size_t most);
    void unref_run(RunId run);
    void hold_node(NodeId node);
    void unhold_node(NodeId node);

    // eviction
    bool can_save(NodeId node) const;
    bool must_save(NodeId node) const;
    // Returns true if eviction must wait for the save of the block, as with write-back. Other
    // policies pass over such a block.
    bool waits_for_save(NodeId node) const {
        return config_.write_policy == SavePolicy::kWriteBack && tree_[node].has(kHostLoading);
    }
    bool evict_one_device(Unsaved unsaved);
    template <class Is>
    std::uint32_t count_up(NodeId last, std::uint32_t most, Is is) const;
    void forget(NodeId node);
    void trim(RunId id, std::uint32_t count);
    std::uint32_t evict_plain(std::uint32_t most);
    std::uint32_t evict_clean(std::uint32_t most);
    std::uint32_t evict_some_device(std::uint32_t most, Unsaved unsaved);
    std::uint32_t evict_some_host(std::uint32_t most);
    void defer(NodeId front, bool stops_at_saves);
    bool evict_one_host();
    void release_device_copy(NodeId node);
    void drop(NodeId node);
    void note_lost_child(NodeId parent);
    void drop_subtree(NodeId top, NodeId above);
    void detach(NodeId node, NodeId evicted_from = kNone);
    struct Leased {
        std::vector<RunId> runs;          // on the paths of leases
        std::vector<BlockId> device_ids;  // of these runs, and those that only a lease has
        std::uint32_t blocks = 0;         // in these runs
    };
    std::optional<Leased> find_leased() const;
    void drop_all_but(const Leased& leased);
    bool drop_unused(RunId id, bool keeps_slots = false);
    void retire_all();
    void free_if_unowned(NodeId node, NodeId evicted_from = kNone);
    void begin_eviction(EvictionCause cause, LeaseId demand = 0) {
        tree_.evicted().begin_eviction(cause, demand);
    }
    // Adds the uncounted blocks to the counts of one cause. Each public method that evicts or drops
    // blocks calls it last.
    void count_as(EvictionCause cause);
    // Returns the blocks with a device id of `blocks` or higher, and all device blocks below those
    // in the tree. Children come before parents; queued blocks come first, in eviction order, then
    // the others by id.
    std::vector<NodeId> beyond_device(std::int64_t blocks);
    void evict(std::span<const NodeId> nodes, EvictionCause cause);

    // host copies of clean blocks
    void list_host_copy(NodeId node);
    void reclaim_host_copy(BlockId host);
    template <class Stays>
    void reclaim_host_copies(std::size_t blocks, Stays stays);

    const CoreConfig& config_;
    Index& index_;
    StoredBlocks& stored_;
    PrefixTree& tree_;
    AuxiliaryGroups& auxiliary_;
    DevicePool& device_;
    RunPool& host_;
    BlockEvents& events_;
    HostCopyList host_copies_;  // clean blocks that no swapped lease holds
    EvictableBlocks evictable_;
    std::uint32_t device_nodes_ = 0;  // nodes with a device id
    std::uint32_t held_nodes_ = 0;    // nodes with holds
    bool stopped_at_unsaved_ = false;
    std::unordered_map<NodeId, std::uint32_t> more_holds_;  // holds beyond kMaxHolds
    std::vector<NodeId> scratch_;

    struct {
        std::uint64_t evicted_device = 0, evicted_host = 0, dropped = 0;
    } uncounted_;  // blocks of the current public call; see count_as()
    EvictionCounts evicted_device_;
    EvictionCounts evicted_host_;
    std::uint64_t evicted_unsaved_ = 0;  // host blocks evicted before their save to a store
    EvictionCounts dropped_;
    std::uint64_t onloaded_ = 0;
    std::uint64_t offloaded_ = 0;
    std::uint64_t failed_ = 0;
    std::uint64_t reclaimed_host_copies_ = 0;
};

template <class Taken>
std::uint32_t Residency::publish(const Lease& lease, std::size_t first, std::size_t added,
                                 Taken taken) {
    const auto nodes = std::span(lease.path).subspan(first);
    const BlockId* table = lease.table.data() + first;
    // True if nothing follows from the first use of a block, and new blocks have no flags.
    const bool is_silent =
        !events_.has_streams() && !config_.copies_after(1) && lease.item_keys.empty();
    std::uint32_t count = 0;
    evictable_.begin_use(nodes);
    tree_.for_each_run(nodes, [&](RunId id, std::span<const NodeId> part) {
        if (tree_.runs()[id].refs++ == 0) evictable_.use(id);
        if (!tree_[part.front()].has(kDeviceResident)) tree_.count_device_child(part.front(), +1);
        bool all_valid = true;
        Node* next = &tree_[part.front()];  // the blocks of a run have consecutive slots
        if (is_silent && part.data() >= lease.path.data() + added) {  // the common case
            for (std::size_t i = 0; i < part.size(); ++i) {
                *next++ = {.device = *table++, .flags = kDeviceValid, .uses = 1};
            }
            count += static_cast<std::uint32_t>(part.size());
            tree_.runs()[id].set(kOnDevice);
            return;
        }
        for (std::size_t i = 0; i < part.size(); ++i, ++table) {
            Node& n = *next++;
            all_valid = all_valid && !n.has(kDeviceLoading);
            if (n.has(kDeviceResident)) continue;
            ++count;
            n.device = *table;
            n.set(kDeviceValid);
            n.count_use();
            n.clear(kBackupFailed);  // a used block is tried again
            events_.changed(part[i]);
            if (n.has(kHostValid)) list_host_copy(part[i]);
            taken(part[i], n);
        }
        if (all_valid) tree_.runs()[id].set(kOnDevice);
    });
    device_nodes_ += count;
    evictable_.classify(lease, first, nodes);
    return count;
}

}  // namespace aiokv
