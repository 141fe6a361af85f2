// One block of the prefix index: 32 bytes, two to a cache line.
#pragma once

#include <cstdint>

#include "aiokv/block_pool.hpp"

namespace aiokv {

using NodeId = std::uint32_t;
constexpr NodeId kNone = 0xffffffff;

enum NodeFlag : std::uint16_t {
    kDeviceValid = 1 << 0,
    kDeviceLoading = 1 << 1,  // an onload owns the device id; `next` holds its transfer id
    kHostValid = 1 << 2,
    kHostLoading = 1 << 3,  // an offload owns the host id
    kDetached = 1 << 4,     // unmatchable; freed when the last ref and pin are gone
    kQueued = 1 << 5,       // in the eviction queue of its fastest tier
    kParked = 1 << 6,       // left that queue because it was blocked; returns to its front
    kBackupQueued = 1 << 7,
    kRoot = 1 << 8,            // no block; `device` holds the context's index
    kHasStoreEntry = 1 << 9,   // StoredBlocks knows its digest, or of its saves
    kBackupFailed = 1 << 10,   // may be dropped without another try
    kHasItems = 1 << 11,       // multimodal items touch it; ItemKeys has its key
    kAhead = 1 << 12,          // counted by Core::clean_ahead_
    kHasSides = 1 << 13,       // a group besides attention may have an id of it
    kAwaitsUse = 1 << 14,      // Core::awaited_ has leases that end with its next use
    kUnsavedParked = 1 << 15,  // in EvictableBlocks::unsaved_parked_
};

constexpr std::uint16_t kDeviceResident = kDeviceValid | kDeviceLoading;
constexpr std::uint32_t kMaxLeases = (1 << 20) - 1;  // largest value of Node::refs
constexpr std::uint32_t kMaxHolds = (1 << 9) - 1;    // in Node::holds; Core counts the rest

struct Node {
    NodeId parent = kNone;
    std::uint32_t child = kNone;  // the only child, or a fork (PrefixTree::kFork bit), or kNone
    NodeId prev = kNone;          // links of the eviction queue, or of the free list
    NodeId next = kNone;
    BlockId device = kNoBlock;
    BlockId host = kNoBlock;
    std::uint32_t refs : 20 = 0;  // granted leases whose path holds the node
    std::uint32_t holds : 9 = 0;  // swapped leases, fetches and saves that need it; saturates
    std::uint32_t pins : 3 = 0;   // transfers that read or write one of its copies; at most two
    std::uint16_t flags = 0;
    std::uint8_t reuse_class = 0;  // class of the last lease: its place among the evictable
    std::uint8_t uses = 0;         // leases granted since it was inserted; saturates

    bool has(std::uint16_t mask) const { return (flags & mask) != 0; }
    void set(std::uint16_t mask) { flags = static_cast<std::uint16_t>(flags | mask); }
    void clear(std::uint16_t mask) { flags = static_cast<std::uint16_t>(flags & ~mask); }
};

static_assert(sizeof(Node) == 32);

}  // namespace aiokv
