// One block of the prefix index, and the runs that blocks form.
#pragma once

#include <cstdint>

#include "aiokv/block_pool.hpp"
#include "aiokv/return_rates.hpp"

namespace aiokv {

using NodeId = std::uint32_t;
constexpr NodeId kNone = 0xffffffff;

enum NodeFlag : std::uint16_t {
    kDeviceValid = 1 << 0,
    kDeviceLoading = 1 << 1,  // a transfer owns the device id; see TransferLedger::onload_of()
    kHostValid = 1 << 2,
    kHostLoading = 1 << 3,  // an offload owns the host id
    kDetached = 1 << 4,     // unmatchable; freed when the last ref and pin are gone
    kBackupQueued = 1 << 5,
    kRoot = 1 << 6,            // not a block; `device` is the index of the context
    kHasStoreEntry = 1 << 7,   // StoredBlocks has its digest, or the state of its saves
    kBackupFailed = 1 << 8,    // may be dropped without another attempt to save it
    kHasItems = 1 << 9,        // multimodal items touch it; ItemKeys has its key
    kAhead = 1 << 10,          // counted by LookAhead
    kHasSides = 1 << 11,       // a group besides attention may have an id of it
    kAwaitsUse = 1 << 12,      // leases in Uses wait for the next use of the block
    kUnsavedParked = 1 << 13,  // in EvictableBlocks::unsaved_parked_
};

constexpr std::uint16_t kDeviceResident = kDeviceValid | kDeviceLoading;
// Limit of Run::refs.
constexpr std::uint32_t kMaxLeases = (1 << 20) - 1;
constexpr std::uint32_t kMaxHolds = (1 << 7) - 1;  // in Node::holds; Residency counts the others
constexpr std::uint32_t kMaxUses = (1 << 8) - 1;

// The state of one block. Its parent, refs and place in an eviction queue belong to its run.
struct Node {
    BlockId device = kNoBlock;
    BlockId host = kNoBlock;
    std::uint32_t flags : 14 = 0;  // NodeFlag
    std::uint32_t uses : 8 = 0;    // leases granted since it was inserted; saturates
    std::uint32_t holds : 7 = 0;   // swapped leases, fetches and saves that need it; saturates
    std::uint32_t pins : 3 = 0;    // transfers that read or write one of its copies; at most two

    bool has(std::uint16_t mask) const { return (flags & mask) != 0; }
    // Returns true if no copy is on the host, and no transfer, save, swapped lease or other group
    // needs the block.
    bool is_plain() const { return host == kNoBlock && (pins | holds) == 0 && !has(kHasSides); }
    void set(std::uint16_t mask) { flags = (flags | mask) & 0x3fff; }
    void clear(std::uint16_t mask) { flags &= ~std::uint32_t{mask}; }
    void count_use() {
        if (uses < kMaxUses) ++uses;
    }
};

static_assert(sizeof(Node) == 12);

using RunId = std::uint32_t;
constexpr RunId kNoRun = 0xffffffff;

enum RunFlag : std::uint8_t {
    kQueued = 1 << 0,      // in the eviction queue of its fastest tier
    kParked = 1 << 1,      // blocked: left that queue, and will return to its front
    kMayBeAhead = 1 << 2,  // some of its blocks may have kAhead
    kOnDevice = 1 << 3,    // all of its blocks have kDeviceValid; without it, some may have it
    kReserved = 1 << 4,    // in the part of its salt's share, or deferred from it: PreferredQueue
};

// How long a run should stay cached: an entry of Levels.
using Level = std::uint16_t;
constexpr Level kNormalLevel = 0;
constexpr Level kDemotedLevel = 1;
constexpr Level kMaxLevel = (1 << 11) - 1;
constexpr std::uint32_t kMaxShares = (1 << 12) - 1;

// Blocks with consecutive ids, each the only child of the one before it. The same leases hold all
// of them, and they are in an eviction queue together, where the last one is evicted first. A run
// is split when only a part of it changes one of these.
struct Run {
    NodeId first = kNone;
    std::uint32_t length = 0;
    NodeId parent = kNone;         // of the first block
    std::uint32_t child = kNone;   // child of the last block: a node, a fork or kNone
    std::uint32_t refs : 20 = 0;   // granted leases whose path holds the blocks
    std::uint32_t share : 12 = 0;  // of its salt, counted from 1; 0: the salt has none
    RunId prev = kNoRun;           // links of the eviction queue
    RunId next = kNoRun;           // next in the eviction queue, or in the free list
    ReuseClass reuse_class = 0;    // class of the last lease; decides the eviction order
    std::uint16_t level : 11 = kNormalLevel;
    std::uint16_t flags : 5 = 0;  // RunFlag

    NodeId last() const { return first + length - 1; }
    bool has(std::uint8_t mask) const { return (flags & mask) != 0; }
    void set(std::uint8_t mask) { flags = (flags | mask) & 0x1f; }
    void clear(std::uint8_t mask) { flags = flags & ~mask & 0x1f; }
};

static_assert(sizeof(Run) == 32);

}  // namespace aiokv
