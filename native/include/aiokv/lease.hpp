// The record of one lease, its state, and what it holds in the pools.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "aiokv/device_pool.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/evicted_runs.hpp"
#include "aiokv/item_keys.hpp"
#include "aiokv/node.hpp"
#include "aiokv/return_rates.hpp"

namespace aiokv {

using LeaseId = std::uint64_t;                  // generation << 32 | index; 0 is no lease
using TicketId = std::array<std::uint8_t, 16>;  // names what a peer sends, or receives
using TransferId = std::uint32_t;
using SaveId = std::uint32_t;  // identifies a block that is being saved; see ExternalSaves

// The allowed transitions are in lease_table.cpp.
enum class LeaseState : std::uint8_t {
    kFree,       // the entry of the table holds no lease
    kMatched,    // holds nothing
    kGranted,    // has refs on its path, and device blocks
    kFailed,     // like kGranted, but an onload failed and recompute_from() was not called yet
    kSwapping,   // like kGranted, while a transfer copies the table to host memory
    kSwapped,    // holds host copies; resume continues at computed_tokens
    kReleasing,  // has no handle; kept while batches or peers' transfers use its blocks
};
constexpr std::size_t kLeaseStates = 7;

// Properties of a lease that do not depend on its state.
struct LeaseFlags {
    bool reads = true;     // may hit
    bool writes = true;    // may publish
    bool computes = true;  // false: it computes nothing and only keeps its hit
    bool whole = false;    // may hit all full blocks of its prompt, because it computes nothing
};

// A snapshot of recurrent state at the end of a block that was not indexed when it was saved.
struct UnattachedSnapshot {
    std::uint32_t block;
    BlockId slot;
};

// Blocks of a group besides attention that a grant took from the cache.
struct GroupHit {
    std::uint32_t device_blocks = 0;
    std::uint32_t host_blocks = 0;  // blocks that only the host had
};

// The state slot and snapshots of a lease; see RecurrentState.
struct RecurrentHolding {
    BlockId slot = kNoBlock;                // the lease's own, while granted or swapped
    BlockId read_snapshot = kNoBlock;       // kept for a lease that computes nothing
    BlockId read_host_snapshot = kNoBlock;  // read instead if the device has no snapshot
    std::vector<UnattachedSnapshot> snapshots;
    GroupHit hit;        // hit of the last grant
    bool valid = false;  // true: the slot matches computed_tokens, once its move has ended
};

// The ids that a lease has in one window group; see SlidingWindows.
struct WindowTable {
    std::vector<BlockId> table;
    std::uint32_t first = 0;
    std::uint32_t end = 0;
    std::uint32_t reserved = 0;  // number of ids of the group that are reserved for the lease
    GroupHit hit;                // hit of the last grant
    // If above 0: windows received from a peer. The table is that behind these positions, which do
    // not count as computed yet.
    std::uint32_t received_tokens = 0;
    TicketId received_ticket{};  // ticket of this receive
    bool has_arrived = false;    // true: all blocks of received_ticket have arrived
};

// The ids of one group that a server has named for a lease; see ExternalGroups.
struct ExternalTable {
    std::vector<BlockId> ids;     // of blocks from Lease::named_from on; kNoBlock: none
    std::vector<BlockId> pinned;  // host ids of the hit, until assign() copies them
    GroupHit hit;                 // hit of the last grant
};

// Positions of a lease.
struct TokenRange {
    std::uint32_t first;
    std::uint32_t end;
};

struct Lease {
    LeaseState state = LeaseState::kFree;  // changed by LeaseTable::move() only
    LeaseFlags flags;
    std::uint32_t generation = 0;
    std::uint32_t index = 0;  // in the LeaseTable
    std::uint32_t context = 0;

    std::vector<std::int32_t> tokens;  // token ids of named positions, from 0
    std::vector<NodeId> path;          // indexed blocks; holds refs while the lease has blocks
    std::vector<ItemKey> item_keys;    // keys of blocks up to the last with items; holds refs
    std::vector<ItemSpan> items;       // multimodal items of the prompt, in order
    std::vector<BlockId> table;        // path[i] has id table[i] exactly if the index owns it
    std::vector<ReuseClass>
        classes;  // by stretch of the prompt; empty before a grant, and with lru
    std::uint32_t stretch_shift = 0;  // log2 of the blocks in a stretch
    std::vector<MissedRun> missed;    // of the last grant, in order; see Misses
    std::uint32_t stored_blocks = 0;  // blocks of the prompt up to the last one left in a store
    StoreMiss left_in_store = StoreMiss::kFailed;  // why it was not fetched
    std::vector<Digest> digests;      // with stores, while matched: of blocks from first_digest on
    std::vector<TransferId> onloads;  // unfinished onloads that write blocks of the table
    std::vector<BlockId> tail_host;   // while swapped: host ids of computed blocks behind the path
    TransferId swap_transfer = 0;     // set in kSwapping
    std::vector<TransferId> peer_transfers;  // transfers in flight that use blocks of the table
    std::vector<SaveId> saving;              // external blocks behind the path that are being saved
    std::vector<TokenRange> received;        // proven, but not committed; ordered, not adjacent

    std::uint64_t version = 0;        // version of the index when path was walked
    std::uint64_t opened_ns = 0;      // tick_nanoseconds()
    std::uint64_t held_since_ns = 0;  // start of the time with blocks, if it computes
    std::uint64_t epoch = 0;          // epoch of the index at the grant
    std::uint32_t num_tokens = 0;
    std::uint32_t computed_tokens = 0;  // number of committed positions
    std::uint32_t device_hit = 0;       // blocks, at match or grant
    std::uint32_t host_hit = 0;
    std::uint32_t first_digest = 0;     // index of the block with the first of `digests`
    std::uint32_t store_hit = 0;        // blocks of host_hit that a fetch brought
    std::uint32_t cached_tokens = 0;    // cached at the grant; falls when an onload fails
    std::uint32_t prompt_tokens = 0;    // length of the matched prompt
    std::uint32_t computed_blocks = 0;  // blocks that commit has begun, over all grants
    std::uint32_t grown_blocks = 0;     // most blocks that extend has given; the limit of a resume
    std::uint32_t known_blocks = 0;     // cached blocks of the prompt, even where a hit cannot end

    NodeId frontier = kNone;  // node behind which its next block will be, while in Promises
    NodeId awaited = kNone;   // last node of its hit, while in Uses

    RecurrentHolding recurrent;
    std::vector<WindowTable> windows;  // one per group, while granted or swapped

    // Compute in flight; see Batches.
    Step last_step = 0;                // newest step that computed with the blocks of this grant
    std::uint32_t batches = 0;         // unfinished batches that compute with its blocks
    std::uint32_t covered_tokens = 0;  // leading positions that ended batches have covered
    bool step_is_exact = false;  // a batch has named this grant: no later step uses its blocks

    // Saves of external device blocks; see ExternalSaves.
    bool save_failed = false;          // true: saves no more blocks in this grant
    bool retires = false;              // drops its refs when saves need them no longer
    std::uint32_t kept_blocks = 0;     // leading blocks that the server will keep on the device
    std::uint32_t counted_blocks = 0;  // leading blocks whose use is counted
    std::uint32_t due_blocks = 0;      // leading blocks that were used often enough
    std::uint64_t use_hash = 0;        // hash of the counted blocks

    // Other groups of a server; see ExternalGroups.
    std::vector<ExternalTable> external;  // one per group, while it has blocks
    std::uint32_t named_from = 0;         // first block whose ids are kept
    std::vector<BlockId> awaited_ids;     // ids it reads that onloads of other leases were writing

    LeaseId id() const { return (LeaseId{generation} << 32) | index; }
    bool is(LeaseState other) const { return state == other; }
    bool is_open() const { return state != LeaseState::kFree; }
    bool has_blocks() const {
        return state == LeaseState::kGranted || state == LeaseState::kFailed ||
               state == LeaseState::kSwapping || state == LeaseState::kReleasing;
    }
    // Returns the first position that is neither computed nor received directly behind the computed
    // ones.
    std::uint32_t end_of_received() const {
        const bool is_next = !received.empty() && received.front().first <= computed_tokens;
        return is_next ? received.front().end : computed_tokens;
    }
    // Returns the class of a block of the prompt; 0 without classes.
    ReuseClass class_of(std::size_t block) const {
        if (classes.empty()) return 0;
        return classes[std::min(block >> stretch_shift, classes.size() - 1)];
    }
    // Returns the first block behind `block` that may have another class.
    std::size_t end_of_class(std::size_t block) const {
        const std::size_t stretch = block >> stretch_shift;
        if (stretch + 1 >= classes.size()) return std::numeric_limits<std::size_t>::max();
        return (stretch + 1) << stretch_shift;
    }
    // Returns how many of the first `count` positions are neither computed, received nor covered by
    // a batch; 0 if the lease has fewer positions than `count`.
    std::int64_t uncovered_tokens(std::int64_t count) const {
        if (batches > 0 || count > num_tokens) return 0;
        const std::uint32_t known = std::max(end_of_received(), covered_tokens);
        return std::max<std::int64_t>(count - known, 0);
    }
    // Drops received positions before `first` and from `end` on, because they can no longer be
    // committed.
    void keep_received(std::uint32_t first, std::uint32_t end) {
        std::erase_if(received, [=](TokenRange& range) {
            range = {std::max(range.first, first), std::min(range.end, end)};
            return range.first >= range.end;
        });
    }
    // Returns true if batches, transfers of peers or external saves use its blocks, even after the
    // lease has given them back.
    bool is_in_use() const { return batches > 0 || !peer_transfers.empty() || !saving.empty(); }
    // Returns the newest step that may use the blocks of the lease. Without a batch that names the
    // lease, the open step, `step`, may use them, too.
    Step last_use(Step step) const { return step_is_exact ? last_step : std::max(last_step, step); }
};

// A lease and its new number of positions, which is not smaller than the present one.
struct Growth {
    Lease* lease;
    std::uint32_t num_tokens;
};

}  // namespace aiokv
