// The scheduler's hot state: prefix index, block pools, leases, transfers and eviction.
//
// One call is one state transition, on one thread, without I/O: so there are no locks.
// violations() checks the invariants I1-I6 of the design from scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/duel.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/reuse_model.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/side_pool.hpp"
#include "aiokv/twin_list.hpp"

namespace aiokv {

class Report;  // of violations

class Core {
  public:
    explicit Core(const CoreConfig& config);

    // -- leases (core.cpp). A released, foreign or made-up id throws LeaseError.
    Hit match(Tokens tokens, std::string_view context, bool reads = true, bool writes = true,
              std::span<const Item> items = {});
    Pending pending(LeaseId id);
    // Throws what allocate would, of a request that can never be granted.
    void check_request(LeaseId id, std::int64_t num_tokens) const;
    Grant allocate(LeaseId id, std::int64_t num_tokens);
    bool can_allocate(LeaseId id, std::int64_t num_tokens, bool saves);  // core_forecast.cpp
    // Returns the lease that keeps the blocks for the batches in flight, or 0.
    LeaseId retract(LeaseId id, Step step);
    void append(LeaseId id, Tokens tokens);
    std::uint32_t commit(LeaseId id, std::int64_t num_tokens, Step step);
    // Returns the lease that keeps the blocks for the batches in flight, or 0.
    LeaseId truncate(LeaseId id, std::int64_t num_tokens, Step step);
    bool extend(std::span<const LeaseId> ids, std::int64_t num_tokens);
    // False: batches in flight keep the blocks, and end_batch() will release the lease.
    // `used_in`: a step that is known to use the blocks, also when a batch has named the lease.
    bool release(LeaseId id, Step step, Step used_in = 0);
    std::int64_t recompute_from(LeaseId id);
    const Lease& lease(LeaseId id) const;
    Usage usage(LeaseId id) const;
    // Granted, and its hit can still be matched: no reset and no failed copy came between.
    bool is_current(LeaseId id) const;
    // Of a window group, or (-1) of all other layers.
    const std::vector<BlockId>& table_of(LeaseId id, std::int32_t group) const;
    void block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                      BlockId fill, std::int32_t group = -1) const;

    // -- compute in flight (core_compute.cpp)
    BatchId begin_batch(std::span<const LeaseId> ids);
    // `step`: 0, or the step that the batch's work belongs to. Returns the leases that waited for
    // it and are released now.
    std::vector<LeaseId> end_batch(BatchId id, Step step);
    std::vector<BatchId> batches(LeaseId id) const;
    bool is_released(LeaseId id) const { return lease(id).released; }

    // -- backups (core_backup.cpp); 0 when there is nothing to copy
    TransferId take_backups();
    TransferId take_write_backs(std::uint32_t wanted_blocks);
    bool wants_write_backs() const;
    // The last attempt to make room stopped at a block that take_write_backs() has not looked at,
    // and no save is in flight whose end might help.
    bool must_look_further() const;
    bool wants_backups() const;

    // -- swap and fork (core_swap.cpp)
    TransferId saving(LeaseId id) const;
    bool swap_out(LeaseId id, Step step);
    Fork fork(LeaseId id, Step step);

    // -- recurrent state (core_state.cpp)
    // The lease will compute nothing, so it takes no state slot; `whole`: it may hit its last
    // block.
    void hold_only(LeaseId id, bool whole = false);
    StateCopy snapshot(LeaseId id, std::int64_t num_tokens, Step step);
    void discard_snapshot(LeaseId id, BlockId slot);
    std::vector<std::uint32_t> snapshot_points(LeaseId id) const;
    bool is_state_move(TransferId id) const { return moves_.contains(id); }
    const StateMove& state_move(TransferId id) const;

    // -- sliding windows (core_window.cpp)
    std::uint32_t reach_tokens(LeaseId id) const;
    const WindowGroup& window_group(std::size_t group) const { return windows_.at(group); }

    // -- transfers (core_transfer.cpp)
    const Transfer& transfer(TransferId id) const;
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block);
    std::vector<TransferId> take_abandoned();
    void mark_cancelling(TransferId id);
    // Steps finish in the order of their numbers.
    void close_step(Step step) { device_.close_step(step); }
    void finish_step(Step step) {
        device_.finish_step(step);
        if (state_) state_->finish_step(step);
        for (WindowGroup& group : windows_) group.pool.finish_step(step);
    }
    // The newest step that may still read or write blocks, state slots or windows; 0: none.
    Step unfinished_step() const {
        Step newest = device_.unfinished_step();
        if (state_) newest = std::max(newest, state_->unfinished_step());
        for (const WindowGroup& group : windows_) {
            newest = std::max(newest, group.pool.unfinished_step());
        }
        return newest;
    }

    // -- capacity (core_capacity.cpp)
    std::uint32_t evict_device(std::uint32_t blocks);
    std::uint32_t evict_host(std::uint32_t blocks);

    // -- uses of what is held (core_uses.cpp)
    void await_use(LeaseId id);
    bool awaits_use(LeaseId id) const { return lease(id).awaited != kNone; }
    std::vector<LeaseId> take_used();

    // -- tiers (core_tiers.cpp)
    void resize_device(std::int64_t blocks);
    void forget_device();
    void forget_host();
    void reset();
    std::uint32_t device_blocks() const { return device_.capacity(); }

    // -- counts that cost nothing
    std::uint32_t granted_leases() const { return granted_leases_; }
    std::uint32_t swapped_leases() const { return swapped_leases_; }
    Room room() const {
        return {device_.free_blocks(), evictable(),
                state_ ? state_->free_ids() + state_->attached() : 0};
    }

    // -- checks (core_check.cpp)
    CoreStatistics statistics() const;
    std::vector<std::string> violations() const;
    std::vector<BlockView> blocks() const;

  private:
    struct Context {
        std::string key;
        NodeId root = kNone;
        std::uint32_t leases = 0;
        std::uint64_t seed = 0;  // of the fingerprints of its prompts
    };

    // leases
    Lease& lease_at(LeaseId id);
    void require_lease_slot() const;
    std::uint32_t open_context(std::string_view key);
    void close_context_if_unused(std::uint32_t context);
    void set_items(Lease& lease, std::span<const Item> items);
    void forget_items(Lease& lease);
    void cut_items(Lease& lease, std::uint32_t num_tokens);
    std::size_t before_cut_item(const Lease& lease, std::size_t blocks) const;
    void walk(Lease& lease);
    void drop_small_onload(Lease& lease);
    void choose_path(Lease& lease, std::size_t usable);
    void classify(Lease& lease);
    void touch(const std::vector<NodeId>& path);
    void take_blocks(LeaseId id, Lease& lease, std::uint32_t total_blocks);
    void give_back(LeaseId id, Lease& lease, Step step);
    void end_lease(LeaseId id, Lease& lease, Step step);
    static Step last_use(const Lease& lease, Step step);
    void await_batches(Lease& keeper);
    LeaseId set_aside(LeaseId id, Lease& lease);
    LeaseId cut_table(LeaseId id, Lease& lease, std::size_t blocks);
    std::size_t joinable(const Lease& lease) const;
    bool fit_writable(Lease& lease, std::uint32_t total_blocks);
    std::size_t writable_path(const Lease& lease, std::size_t resident, std::size_t writable) const;
    void check_batches(Report& report) const;
    void free_table(Lease& lease, Step step);
    void start_onload(LeaseId id, Lease& lease, std::uint32_t first_host_block);
    std::uint32_t publish(Lease& lease);
    std::size_t hit_limit(const Lease& lease) const;
    std::size_t border_before(std::size_t length) const;
    void announce(Lease& lease);
    void withdraw(Lease& lease);
    void set_granted(Lease& lease, bool granted);
    bool shed_detached(Lease& lease);
    NodeId publish_block(Lease& lease, NodeId parent, std::uint32_t index);
    bool is_private(const Lease& lease, std::size_t index) const;
    bool is_indexed(const Lease& lease, std::size_t index) const;
    LeaseId open_lease(Tokens tokens, std::uint32_t context, bool reads, bool writes);
    std::uint32_t blocks_for(std::uint64_t num_tokens) const;
    NodeId root_of(const Lease& lease) const { return contexts_[lease.context].root; }

    // backups
    void count_use(NodeId node);
    void queue_backup(NodeId node);
    TransferId start_offload(std::vector<NodeId> nodes, std::span<const BlockId> tail_device = {},
                             std::span<const BlockId> tail_host = {});
    void note_twin(NodeId node);
    void make_host_room(std::size_t blocks, std::uint32_t near_blocks);
    void forget_ahead();
    void leave_ahead(NodeId node);
    void give_up_twin(BlockId host);
    bool must_save(NodeId node) const;
    bool is_saving() const;
    static bool can_go(const Node& n) { return n.has(kHostValid | kHostLoading | kBackupFailed); }

    // transfers
    void finish_onload(Transfer& transfer, std::uint32_t good);
    void cancel_onload(Transfer& transfer);
    void finish_offload(Transfer& transfer, std::uint32_t good);
    void fail_leases(const Transfer& transfer, NodeId first_bad);
    void fail_lease(Lease& lease, std::uint32_t good_blocks);
    void settle_leases(TransferId id, const Transfer& transfer);
    void leave_onloads(LeaseId id, Lease& lease, Step step);

    // swap
    void trim_swapped(Lease& lease);
    void finish_swap_out(Lease& lease, bool moved);
    void drop_swapped(Lease& lease);
    std::size_t tail_under_way(LeaseId id) const;
    void orphan_tail(Transfer& transfer, Step step);
    void finish_tail(Transfer& transfer, std::uint32_t good_blocks);
    void hold(NodeId node);
    void unhold(NodeId node);
    bool could_make_host_room(std::size_t blocks) const;
    void take_host_back(std::span<const BlockId> ids);

    // recurrent state
    std::size_t reachable(const Lease& lease, std::size_t blocks) const;
    bool has_own_sides(const Lease& lease) const;
    void use_sides(const Lease& lease, Step step);
    bool make_side_room(const Lease& lease, std::uint32_t total_blocks);
    bool has_state_room(const Lease& lease) const;
    void take_state(LeaseId id, Lease& lease);
    BlockId take_slot();
    void start_move(LeaseId id, Lease& lease, BlockId source);
    void finish_move(TransferId id, Outcome outcome);
    void orphan_move(StateMove& move, Step step);
    void attach_snapshots(Lease& lease);
    void forget_snapshots(Lease& lease, Step step);
    void give_state_back(Lease& lease, Step step);

    void check_state(Report& report) const;

    // sliding windows
    bool has_sides() const { return state_.has_value() || !windows_.empty(); }
    bool can_resume(const std::vector<NodeId>& path, std::size_t blocks) const;
    bool covers(const SidePool& pool, const std::vector<NodeId>& path, std::size_t blocks) const;
    void touch_sides(const std::vector<NodeId>& path);
    std::uint32_t reserve_of(const WindowGroup& group, std::uint32_t total_blocks) const;
    bool can_extend_windows(std::span<const LeaseId> ids, std::uint64_t more) const;
    bool has_window_room(const Lease& lease, std::uint32_t total_blocks) const;
    void take_windows(Lease& lease);
    void fit_window(WindowGroup& group, WindowTable& window, const Lease& lease, Step step);
    void fit_windows(Lease& lease, Step step);
    void fill_window(WindowGroup& group, WindowTable& window);
    void publish_windows(Lease& lease, std::size_t first);
    void advance_windows(Lease& lease, Step step);
    void drop_from(WindowGroup& group, WindowTable& window, std::size_t index, Step step);
    void give_windows_back(Lease& lease, Step step);
    void check_windows(Report& report) const;
    void check_window(Report& report, std::size_t group) const;

    // uses
    void note_use(const Lease& user);
    void forget_use(Lease& lease);
    void check_uses(Report& report) const;

    // capacity
    class Forecast;
    std::uint32_t reserve_for(std::uint32_t total_blocks) const;
    bool could_make_side_room(const Lease& lease, std::uint32_t total_blocks,
                              bool& frees_host) const;
    bool make_room(std::uint32_t blocks);
    bool evict_one_device();
    bool evict_one_host();
    void release_device_copy(NodeId node);
    void unref(NodeId node);
    void enqueue(NodeId node);
    void dequeue(NodeId node);
    void park(NodeId node);
    void count_idle_host(const Node& n, int change);
    void unpark_if_free(NodeId node);
    void drop(NodeId node);
    void drop_subtree(NodeId top);
    void detach(NodeId node);
    void free_if_unowned(NodeId node);
    EvictionQueue<PrefixTree>& queue_of(NodeId node);
    std::uint32_t evictable() const { return device_queue_.size() + parked_device_; }

    // tiers
    void require_rest(const char* tier, bool swapped_too) const;
    std::vector<NodeId> beyond_device(std::int64_t blocks);

    CoreConfig config_;
    PrefixTree tree_;
    DevicePool device_;
    RunPool host_;
    TwinList twins_;                   // of nodes that no swapped lease holds
    std::optional<ReuseModel> reuse_;  // none: lru
    std::optional<Duel> device_duel_;
    std::optional<Duel> host_duel_;
    EvictionQueue<PrefixTree> device_queue_;  // ref 0 and device VALID, the next victim first
    EvictionQueue<PrefixTree> host_queue_;    // ref 0 and host VALID only
    std::uint32_t parked_device_ = 0;
    std::uint32_t idle_host_ = 0;     // queued or parked, host VALID only, not held
    std::uint32_t device_nodes_ = 0;  // nodes with a device id

    std::optional<SidePool> state_;  // working slots of leases, and snapshots of nodes
    std::unordered_map<TransferId, StateMove> moves_;
    std::vector<WindowGroup> windows_;

    std::deque<Lease> leases_;
    std::unordered_multimap<NodeId, LeaseId> awaited_;  // nodes with kAwaitsUse -> holders
    std::vector<LeaseId> used_;                         // holders whose use take_used() will tell
    Promises promises_{leases_, config_.block_tokens};
    std::uint32_t granted_leases_ = 0;
    std::uint32_t swapped_leases_ = 0;
    std::vector<std::uint32_t> free_leases_;
    std::uint32_t releasing_leases_ = 0;  // released, while batches in flight keep their blocks
    std::uint32_t computing_leases_ = 0;  // granted, and not only to hold
    // A resize that was refused because of a transfer or a step.
    struct ResizeTry {
        std::int64_t blocks = 0;
        std::uint64_t ended_transfers = 0;
        Step finished_step = 0;
        bool operator==(const ResizeTry&) const = default;
    };
    ResizeTry refused_resize_;
    std::size_t resize_slot_ = 0;  // of the lease that was in the way of the last one
    std::uint64_t ended_transfers_ = 0;
    std::deque<Context> contexts_;
    std::vector<std::uint32_t> free_contexts_;
    std::unordered_map<std::string, std::uint32_t> context_ids_;

    std::unordered_map<NodeId, std::uint32_t> more_holds_;  // of nodes with kMaxHolds
    std::unordered_map<TransferId, Transfer> transfers_;
    TransferId last_transfer_ = 0;
    std::unordered_map<BatchId, std::vector<LeaseId>> batches_;
    BatchId last_batch_ = 0;
    std::vector<TransferId> abandoned_;
    std::vector<NodeId> backups_;  // nodes with kBackupQueued; stale entries lack the flag
    // The front of the device queue up to ahead_last_ was looked at: clean_ahead_ of it can go, or
    // fewer than that are counted. kNone: nothing was.
    NodeId ahead_last_ = kNone;
    bool stopped_at_unsaved_ = false;  // the last make_room()
    std::uint32_t clean_ahead_ = 0;
    std::vector<NodeId> scratch_;

    std::uint64_t version_ = 1;  // changes whenever a walked path may have become wrong
    std::uint64_t epoch_ = 1;    // changes with reset
    CoreStatistics counters_{};
};

}  // namespace aiokv
