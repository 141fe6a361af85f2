// The configuration of Core, the records of transfers, and the results of its calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "aiokv/device_pool.hpp"
#include "aiokv/direction.hpp"
#include "aiokv/eviction_cause.hpp"
#include "aiokv/item_keys.hpp"
#include "aiokv/lease.hpp"
#include "aiokv/node.hpp"

namespace aiokv {

using BatchId = std::uint32_t;
using GroupId = std::int32_t;  // a block group: one of these two, or the index of a window group
constexpr GroupId kAttention = -2;
constexpr GroupId kRecurrentState = -1;
using Tokens = std::span<const std::int32_t>;

// When blocks are saved to the next slower tier: from the device to host memory, or from host
// memory to stores.
enum class SavePolicy : std::uint8_t {
    kNone,
    kWriteThrough,  // when they are committed, or when they reach host memory
    kNthUse,        // at their n-th use; computing them is the first
    kWriteBack,     // shortly before their eviction; the device drops no unsaved block
};

// Returns true if a block with this number of uses is saved.
constexpr bool saves_after(SavePolicy policy, std::uint32_t n, std::uint32_t uses) {
    return policy == SavePolicy::kWriteThrough || (policy == SavePolicy::kNthUse && uses >= n);
}

// When host blocks are saved to the stores.
struct StoreConfig {
    bool exist = false;
    SavePolicy policy = SavePolicy::kWriteThrough;
    std::uint32_t uses = 2;             // the n of kNthUse
    std::uint32_t queue_blocks = 4096;  // blocks that may wait for a save
    std::uint32_t ahead_blocks = 0;     // kWriteBack: number of host blocks to keep free or saved

    // Returns true if a host copy with this number of uses is saved.
    bool saves_after(std::uint32_t uses_so_far) const {
        return aiokv::saves_after(policy, uses, uses_so_far);
    }
};

// Layers whose attention sees the first `sink_tokens` positions and the last `window_tokens`,
// including the current one.
struct WindowConfig {
    std::uint32_t device_blocks = 0;
    std::uint32_t window_tokens = 0;
    std::uint32_t step_tokens = 0;  // most positions that a step computes for a lease; 0: no limit
    std::uint32_t sink_tokens = 0;  // 0: no sink
    std::uint32_t host_blocks = 0;  // blocks in host memory

    // Blocks that a hit needs at its end, and at the beginning of the prompt.
    std::uint32_t tail_blocks(std::uint32_t block_tokens) const {
        const std::uint32_t seen = window_tokens == 0 ? 0 : window_tokens - 1;
        return seen / block_tokens + (seen % block_tokens != 0);
    }
    std::uint32_t head_blocks(std::uint32_t block_tokens) const {
        return sink_tokens / block_tokens + (sink_tokens % block_tokens != 0);
    }
};

struct CoreConfig {
    std::uint32_t block_tokens = 16;
    std::uint32_t device_blocks = 0;
    std::uint32_t host_blocks = 0;
    std::uint32_t leave_tokens = 1;    // positions at the end of a prompt that are always computed
    std::uint32_t reserve_blocks = 0;  // blocks that allocate leaves to extend
    SavePolicy write_policy = SavePolicy::kNone;
    std::uint32_t write_uses = 2;            // the n of kNthUse
    std::uint32_t low_watermark_blocks = 0;  // blocks to keep free or clean by early eviction
    std::uint32_t min_onload_blocks = 0;     // hits on fewer host blocks are computed instead
    std::string eviction = "lru";            // name of a policy; see EvictionOrder
    std::uint32_t state_slots = 0;           // 0: the model has no recurrent state
    std::vector<WindowConfig> windows = {};
    std::uint32_t max_leases = kMaxLeases;  // most leases that are open at a time
    StoreConfig stores = {};
    std::uint32_t host_state_slots = 0;  // snapshots in host memory
    bool external_device = false;        // a server owns the device blocks; see ExternalBlocks
    bool splits_items = false;           // a hit may end inside a multimodal item
    std::vector<std::string> share_salts = {};  // salts with a share of the cached blocks
    std::vector<double> shares = {};            // of each of them, between 0 and 1
    std::uint32_t history_blocks = 0;           // most evicted blocks to remember; see EvictedRuns

    // Returns true if a device block with this number of uses is copied to host memory.
    bool copies_after(std::uint32_t uses) const {
        return saves_after(write_policy, write_uses, uses);
    }
    std::uint32_t blocks_for(std::uint64_t num_tokens) const {
        return static_cast<std::uint32_t>((num_tokens + block_tokens - 1) / block_tokens);
    }
};

struct Hit {
    LeaseId lease;
    std::uint32_t device_blocks;
    std::uint32_t host_blocks;
};

// Cached positions of a lease by tier, and the blocks that it computed.
struct Usage {
    std::uint32_t prompt_tokens;
    std::uint32_t cached_device_tokens;  // cached at the last grant
    std::uint32_t cached_host_tokens;
    std::uint32_t computed_blocks;      // counts recomputed blocks again
    std::uint32_t cached_store_tokens;  // cached tokens that a fetch brought
};

// Device blocks and state slots that could be granted now.
struct Room {
    std::uint32_t device_free;
    std::uint32_t evictable;
    std::uint32_t state_slots;
};

// Blocks behind a match that a granted lease will compute.
struct Pending {
    LeaseId owner;  // 0: none
    std::uint32_t blocks;
};

enum class Grant : std::uint8_t { kNone, kReady, kLoading };
enum class Outcome : std::uint8_t { kDone, kFailed, kCancelled };

// Returns the number of leading blocks whose bytes have arrived.
inline std::uint32_t proven(Outcome outcome, std::uint32_t first_bad, std::size_t blocks) {
    const auto all = static_cast<std::uint32_t>(blocks);
    if (outcome == Outcome::kDone) return all;
    return outcome == Outcome::kFailed ? std::min(first_bad, all) : 0;
}

struct Transfer {
    Direction direction = Direction::kOnload;
    Step after_step = 0;
    std::vector<NodeId> nodes;  // in path order; pinned
    std::vector<BlockId> device_blocks;
    std::vector<BlockId> host_blocks;
    std::vector<LeaseId> leases;  // leases that own or joined an onload
    // The transfer also copies the tail of this swapped lease: blocks behind `nodes` that are not
    // indexed. If the lease is released or retracted before the end, the transfer owns them.
    LeaseId tail_owner = 0;
    bool orphaned = false;    // the tail's owner has given it back, and may join the transfer again
    bool cancelling = false;  // a worker was asked to cancel it: no other lease may join it

    bool has_tail_of(LeaseId lease) const { return tail_owner == lease && !orphaned; }
    std::size_t tail_blocks() const { return device_blocks.size() - nodes.size(); }
};

// A copy of one state slot to another, on the device.
struct StateCopy {
    BlockId source = kNoBlock;
    BlockId target = kNoBlock;  // kNoBlock: none
};

// Pools of the sources and of the targets of a move.
enum class MoveRoute : std::uint8_t {
    kOnDevice,
    kFromHost,  // the sources are in host memory
    kToHost,    // the targets are in host memory: indexed ids are saved
};

// A copy of ids of one auxiliary pool: it fills ids of a lease with copies or zeros, or saves
// indexed ids.
struct Move {
    LeaseId lease = 0;             // 0: a save, or the lease has gone and the move owns the targets
    std::vector<BlockId> sources;  // the move reads each of them; kNoBlock: fill with zeros
    std::vector<BlockId> targets;
    Step after_step = 0;
    MoveRoute route = MoveRoute::kOnDevice;
    GroupId group = kRecurrentState;  // or a window group
};

struct Fork {
    LeaseId lease;  // 0: no room
    std::vector<BlockId> source_blocks;
    std::vector<BlockId> target_blocks;  // targets of the copies; the state slot is copied, too
};

// Blocks of a group in one tier: snapshots for recurrent state.
struct TierCounts {
    std::uint32_t blocks, free, cached, leased, in_flight;
    CountByName evicted_by_cause;

    std::uint64_t evicted_blocks() const { return total(evicted_by_cause); }
};

struct GroupStatistics {
    TierCounts device, host;
    std::uint32_t set_aside_blocks;
    std::uint64_t cloned;  // copies on the device
    std::uint64_t onloaded_blocks, offloaded_blocks;
    std::uint64_t fetched_blocks, unfetched_blocks, saved_blocks;
    CountByName unsaved_by_cause;
    std::uint64_t received_blocks, sent_blocks;
};

struct CoreStatistics {
    GroupStatistics attention;
    std::uint32_t evictable_blocks, leases, releasing_leases, nodes;
    std::uint64_t hit_device_tokens, hit_host_tokens, hit_store_tokens, prompt_tokens, grants;
    std::uint64_t computed_tokens, computed_prompt_tokens;
    MissCounts missed_tokens;
    CountByName dropped_by_cause;
    std::uint64_t published_blocks, failed_blocks, skipped_backups, reclaimed_host_copies;
    std::uint64_t fetches, receives, failed_receives, sends, failed_sends;
    std::size_t index_bytes, token_bytes;
};

// One indexed block, for dumps and tests.
struct BlockView {
    std::string_view context;
    std::vector<std::int32_t> prefix;  // token ids of the block and of all blocks before it
    const Node* node;
    std::uint32_t refs;
};

}  // namespace aiokv
