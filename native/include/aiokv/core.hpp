// The scheduler's hot state: prefix index, block pools, leases, transfers and eviction.
//
// One call is one state transition, on one thread, without I/O: so there are no locks.
// violations() checks the invariants I1-I6 of the design from scratch.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aiokv/device_pool.hpp"
#include "aiokv/direction.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/reuse_model.hpp"
#include "aiokv/side_pool.hpp"

namespace aiokv {

using LeaseId = std::uint64_t;  // generation << 32 | slot; 0 is no lease
using TransferId = std::uint32_t;
using Tokens = std::span<const std::int32_t>;

enum class WritePolicy : std::uint8_t {
    kNone,
    kWriteThrough,           // at commit
    kWriteThroughSelective,  // at the n-th use
    kWriteBack,              // when eviction comes near; nothing is dropped that was not saved
};

// Layers whose attention sees the last `window_tokens` positions, its own included.
struct WindowConfig {
    std::uint32_t device_blocks = 0;
    std::uint32_t window_tokens = 0;
    std::uint32_t step_tokens = 0;  // the most that a step computes of a lease; 0: anything
};

struct CoreConfig {
    std::uint32_t block_tokens = 16;
    std::uint32_t device_blocks = 0;
    std::uint32_t host_blocks = 0;
    std::uint32_t leave_tokens = 1;    // positions at the end of a prompt that are always computed
    std::uint32_t reserve_blocks = 0;  // kept from allocate, for extend
    WritePolicy write_policy = WritePolicy::kNone;
    std::uint32_t write_through_threshold = 2;
    std::uint32_t low_watermark_blocks = 0;  // free or clean; eviction runs ahead of this
    std::uint32_t min_onload_blocks = 0;     // fewer host blocks than this are computed instead
    EvictionKind eviction = EvictionKind::kLru;
    std::uint32_t state_slots = 0;  // of recurrent state; 0: the model has none
    std::vector<WindowConfig> windows = {};
};

// The state after the last position of a block of a lease, saved before that block was indexed.
struct UnattachedSnapshot {
    std::uint32_t block;
    BlockId slot;
};

// The ids that a lease has in one group; see core_window.cpp.
struct WindowTable {
    std::vector<BlockId> table;
    std::uint32_t first = 0;
    std::uint32_t end = 0;
    std::uint32_t reserved = 0;  // of the group's ids, set aside for the lease
};

struct WindowGroup {
    WindowGroup(const WindowConfig& config, std::uint32_t block_tokens);

    SidePool pool;
    std::uint32_t window_tokens;
    std::uint32_t reach_blocks;  // the most that a lease has at a time
    std::uint32_t reserved = 0;  // for all leases together; at most the capacity
};

struct Lease {
    std::vector<std::int32_t> tokens;  // of named positions, from 0
    std::vector<NodeId> path;          // indexed blocks; holds refs once granted
    std::vector<ItemKey> item_keys;    // of blocks up to the last with items; refs each but 0
    std::vector<ItemSpan> items;       // multimodal items of the prompt, in order
    std::vector<BlockId> table;        // block i is the index's iff path[i] has this device id
    std::vector<ReuseClass> classes;   // of the prompt, once granted; empty with lru
    std::vector<TransferId> onloads;   // unfinished ones that write blocks of the table
    std::vector<BlockId> tail_host;    // while swapped: what follows the path, computed, in host
    TransferId swap_out = 0;           // while its table moves to host memory
    std::uint32_t generation = 0;
    std::uint32_t slot = 0;
    std::uint32_t context = 0;
    std::uint64_t version = 0;  // of the index, when path was walked
    std::uint64_t epoch = 0;    // of the index, when granted
    std::uint32_t num_tokens = 0;
    std::uint32_t computed_tokens = 0;  // as far as commit was called
    std::uint32_t device_hit = 0;       // blocks, at match or grant
    std::uint32_t host_hit = 0;
    std::uint32_t cached_tokens = 0;    // of the grant; falls when an onload fails
    std::uint32_t prompt_tokens = 0;    // as matched
    std::uint32_t computed_blocks = 0;  // begun by commit, over all grants
    BlockId state_slot = kNoBlock;      // the lease's own, while granted or swapped
    BlockId held_snapshot = kNoBlock;   // of a lease that computes nothing
    std::vector<UnattachedSnapshot> snapshots;
    std::vector<WindowTable> windows;  // one a group, while granted or swapped
    std::uint32_t known_blocks =
        0;                     // cached blocks of the prompt, whether or not a hit may end there
    NodeId frontier = kNone;   // where its next block will hang, while it is announced
    bool reads = true;         // may hit
    bool writes = true;        // may publish
    bool computes = true;      // else it only keeps its hit where it is
    bool state_valid = false;  // the state slot is that of computed_tokens, once its move has ended
    bool live = false;
    bool granted = false;
    bool swapped = false;  // preempted; holds its host copies
    bool failed = false;   // an onload failed and recompute_from was not called yet
};

struct Hit {
    LeaseId lease;
    std::uint32_t device_blocks;
    std::uint32_t host_blocks;
};

// What a lease was spared, by tier, and what it computed.
struct Usage {
    std::uint32_t prompt_tokens;
    std::uint32_t cached_device_tokens;  // of the prompt, at the last grant
    std::uint32_t cached_host_tokens;
    std::uint32_t computed_blocks;  // again after a preemption
};

// Blocks behind a match that a granted lease has promised to compute.
struct Pending {
    LeaseId owner;  // 0: nobody
    std::uint32_t blocks;
};

enum class Grant : std::uint8_t { kNone, kReady, kLoading };
enum class Outcome : std::uint8_t { kDone, kFailed, kCancelled };

struct Transfer {
    Direction direction = Direction::kOnload;
    Step after_step = 0;
    std::vector<NodeId> nodes;  // in path order; pinned
    std::vector<BlockId> device_blocks;
    std::vector<BlockId> host_blocks;
    std::vector<LeaseId> leases;  // that own or joined an onload
    // Blocks behind those of `nodes` are not indexed: the tail of a lease that is swapped. When the
    // lease goes first, they are the transfer's to free.
    LeaseId tail_owner = 0;
    bool orphaned = false;
};

// A copy of one state slot to another, on the device.
struct StateCopy {
    BlockId source = kNoBlock;
    BlockId target = kNoBlock;  // kNoBlock: none
};

// Makes a lease's state slot ready: a copy of a snapshot, or zeros.
struct StateMove {
    LeaseId lease = 0;          // 0: it has gone, and the target is the move's
    BlockId source = kNoBlock;  // held; kNoBlock: zeros
    BlockId target = kNoBlock;
    Step after_step = 0;
};

struct Fork {
    LeaseId lease;  // 0: no room
    std::vector<BlockId> source_blocks;
    std::vector<BlockId> target_blocks;  // and the state slot, from lease to lease
};

struct CoreStatistics {
    std::uint32_t device_free, device_cached, device_leased, device_in_flight, device_cooling;
    std::uint32_t host_free, host_cached, host_in_flight;
    std::uint32_t evictable_blocks, leases, nodes;
    std::uint64_t hit_device_tokens, hit_host_tokens, prompt_tokens, grants;
    std::uint64_t published_blocks, evicted_device_blocks, dropped_blocks, evicted_host_blocks;
    std::uint64_t onloaded_blocks, offloaded_blocks, failed_blocks, skipped_backups,
        reclaimed_twins;
    std::uint32_t state_free, state_snapshots;
    std::uint64_t restored_states, evicted_snapshots;
    std::size_t index_bytes, token_bytes;
};

// One indexed block, for dumps and tests.
struct BlockView {
    std::string_view context;
    std::vector<std::int32_t> prefix;  // its tokens and all before them
    const Node* node;
};

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
    void retract(LeaseId id, Step step);
    void append(LeaseId id, Tokens tokens);
    std::uint32_t commit(LeaseId id, std::int64_t num_tokens, Step step);
    void truncate(LeaseId id, std::int64_t num_tokens, Step step);
    bool extend(std::span<const LeaseId> ids, std::int64_t num_tokens);
    void release(LeaseId id, Step step);
    std::int64_t recompute_from(LeaseId id);
    const Lease& lease(LeaseId id) const;
    Usage usage(LeaseId id) const;
    bool is_shared(LeaseId id) const;
    // Of a window group, or (-1) of all other layers.
    const std::vector<BlockId>& table_of(LeaseId id, std::int32_t group) const;
    void block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                      BlockId fill, std::int32_t group = -1) const;

    // -- backups (core_backup.cpp); 0 when there is nothing to copy
    TransferId take_backups();
    TransferId take_write_backs(std::uint32_t wanted_blocks);
    bool wants_write_backs() const;
    bool wants_backups() const;

    // -- swap and fork (core_swap.cpp)
    TransferId saving(LeaseId id) const;
    bool swap_out(LeaseId id, Step step);
    Fork fork(LeaseId id, Step step);

    // -- recurrent state (core_state.cpp)
    // The lease will compute nothing, so it takes no state slot.
    void hold_only(LeaseId id);
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
    void finish_step(Step step) {
        device_.finish_step(step);
        if (state_) state_->finish_step(step);
        for (WindowGroup& group : windows_) group.pool.finish_step(step);
    }

    // -- capacity (core_capacity.cpp)
    std::uint32_t evict_device(std::uint32_t blocks);
    std::uint32_t evict_host(std::uint32_t blocks);
    void resize_device(std::int64_t blocks);
    void forget_device();
    void forget_host();
    void reset();
    std::uint32_t device_blocks() const { return device_.capacity(); }

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
    std::uint32_t open_context(std::string_view key);
    void close_context_if_unused(std::uint32_t context);
    void set_items(Lease& lease, std::span<const Item> items);
    void forget_items(Lease& lease);
    std::size_t before_cut_item(const Lease& lease, std::size_t blocks) const;
    void walk(Lease& lease);
    void drop_small_onload(Lease& lease);
    void choose_path(Lease& lease, std::size_t usable);
    void classify(Lease& lease);
    void touch(const std::vector<NodeId>& path);
    void take_blocks(LeaseId id, Lease& lease, std::uint32_t total_blocks);
    void give_back(LeaseId id, Lease& lease, Step step);
    void free_table(Lease& lease, Step step);
    void start_onload(LeaseId id, Lease& lease, std::uint32_t first_host_block);
    std::uint32_t publish(Lease& lease);
    std::size_t hit_limit(const Lease& lease) const;
    std::size_t border_before(std::size_t length) const;
    void announce(Lease& lease);
    void withdraw(Lease& lease);
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
    void make_host_room(std::size_t blocks, std::vector<NodeId> near_eviction);
    bool reclaim_one_twin(const std::vector<NodeId>& near_eviction, std::vector<NodeId>& spared);
    bool must_save(NodeId node) const;
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

    // capacity
    bool make_room(std::uint32_t blocks);
    void require_rest(const char* tier, bool swapped_too) const;
    bool evict_one_device();
    bool evict_one_host();
    void release_device_copy(NodeId node);
    std::vector<NodeId> beyond_device(std::int64_t blocks);
    void unref(NodeId node);
    void enqueue(NodeId node);
    void dequeue(NodeId node);
    void park(NodeId node);
    void unpark_if_free(NodeId node);
    void drop(NodeId node);
    void drop_subtree(NodeId top);
    void detach(NodeId node);
    void free_if_unowned(NodeId node);
    EvictionQueue& queue_of(NodeId node);
    std::uint32_t evictable() const { return device_queue_.size() + parked_device_; }

    CoreConfig config_;
    PrefixTree tree_;
    DevicePool device_;
    BlockPool host_;
    std::optional<ReuseModel> reuse_;  // none: lru
    EvictionQueue device_queue_;       // ref 0 and device VALID, the next victim first
    EvictionQueue host_queue_;         // ref 0 and host VALID only
    std::uint32_t parked_device_ = 0;

    std::optional<SidePool> state_;  // working slots of leases, and snapshots of nodes
    std::unordered_map<TransferId, StateMove> moves_;
    std::vector<WindowGroup> windows_;

    std::deque<Lease> leases_;
    std::unordered_multimap<NodeId, std::uint32_t> promises_;  // frontier -> slot of the lease
    std::vector<std::uint32_t> free_leases_;
    std::deque<Context> contexts_;
    std::vector<std::uint32_t> free_contexts_;
    std::unordered_map<std::string, std::uint32_t> context_ids_;

    std::unordered_map<TransferId, Transfer> transfers_;
    TransferId last_transfer_ = 0;
    std::vector<TransferId> abandoned_;
    std::vector<NodeId> backups_;  // nodes with kBackupQueued; stale entries lack the flag
    std::vector<NodeId> twins_;    // nodes with kTwinListed, newest last; stale ones lack the flag
    std::uint32_t clean_ahead_ = 0;  // no more than can_go() at the front of the device queue
    std::vector<NodeId> scratch_;

    std::uint64_t version_ = 1;  // changes whenever a walked path may have become wrong
    std::uint64_t epoch_ = 1;    // changes with reset
    CoreStatistics counters_{};
};

}  // namespace aiokv
