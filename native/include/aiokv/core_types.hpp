// What Core is configured with, keeps of each lease and transfer, and answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "aiokv/device_pool.hpp"
#include "aiokv/direction.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/item_keys.hpp"
#include "aiokv/node.hpp"
#include "aiokv/reuse_model.hpp"
#include "aiokv/side_pool.hpp"

namespace aiokv {

using LeaseId = std::uint64_t;  // generation << 32 | slot; 0 is no lease
using TransferId = std::uint32_t;
using BatchId = std::uint32_t;
using Tokens = std::span<const std::int32_t>;

enum class WritePolicy : std::uint8_t {
    kNone,
    kWriteThrough,           // at commit
    kWriteThroughSelective,  // at the n-th use
    kWriteBack,              // when eviction comes near; nothing is dropped that was not saved
};

// Layers whose attention sees the first `sink_tokens` positions and the last `window_tokens`, its
// own included.
struct WindowConfig {
    std::uint32_t device_blocks = 0;
    std::uint32_t window_tokens = 0;
    std::uint32_t step_tokens = 0;  // the most that a step computes of a lease; 0: anything
    std::uint32_t sink_tokens = 0;  // 0: the window only
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
    std::uint32_t max_leases = kMaxLeases;  // open at a time
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
    // Entry `index` is a block of the sink, which stays as long as the lease has blocks.
    bool is_sink(std::size_t index) const { return index < pool.head_blocks(); }

    std::uint32_t window_tokens;
    std::uint32_t reach_blocks;  // the most that a lease has at a time, the sink included
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
    std::uint32_t grown_blocks = 0;    // the most that extend has given it; resume may take as many
    BlockId state_slot = kNoBlock;     // the lease's own, while granted or swapped
    BlockId held_snapshot = kNoBlock;  // of a lease that computes nothing
    std::vector<UnattachedSnapshot> snapshots;
    std::vector<WindowTable> windows;  // one a group, while granted or swapped
    std::uint32_t known_blocks =
        0;                     // cached blocks of the prompt, whether or not a hit may end there
    NodeId frontier = kNone;   // where its next block will hang, while it is announced
    NodeId awaited = kNone;    // the end of its hit, while another lease's hit of that ends it
    bool reads = true;         // may hit
    bool writes = true;        // may publish
    bool computes = true;      // else it only keeps its hit where it is
    bool whole = false;        // it may hit all full blocks of its prompt, as nothing is computed
    bool state_valid = false;  // the state slot is that of computed_tokens, once its move has ended
    bool live = false;
    bool granted = false;
    bool swapped = false;  // preempted; holds its host copies
    bool failed = false;   // an onload failed and recompute_from was not called yet

    // Compute in flight; see core_compute.cpp.
    Step last_step = 0;         // newest step that computed with the blocks of this grant
    std::uint32_t batches = 0;  // unfinished batches that compute with its blocks
    bool named = false;         // a batch has named this grant: last_step is exact
    bool released = false;      // waits for those batches; there is no handle any more
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

// What could be granted: device blocks, and state slots that no lease holds.
struct Room {
    std::uint32_t device_free;
    std::uint32_t evictable;
    std::uint32_t state_slots;
};

// Blocks behind a match that a granted lease has promised to compute.
struct Pending {
    LeaseId owner;  // 0: none
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
    bool cancelling = false;  // a worker was asked to cancel it: no other lease may join it
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
    std::uint32_t evictable_blocks, leases, releasing_leases, nodes;
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

}  // namespace aiokv
