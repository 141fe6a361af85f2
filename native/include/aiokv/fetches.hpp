// Fetches: blocks behind the cached prefix of a prompt that a store brings to the host tier.
//
// A fetch owns its host ids outside the tree, and knows the tokens of its blocks, because its lease
// may end first. Only complete() puts them into the tree, the proven ones (I4). The node above them
// is held meanwhile; when it is dropped all the same, such as by a reset, nothing is inserted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/index.hpp"
#include "aiokv/matching.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/save_queue.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

struct Fetch : StoreTransfer {         // in path order
    std::vector<std::int32_t> tokens;  // token ids of all blocks
    std::vector<ItemKey> item_keys;    // one per block, refs each but 0
    NodeId above = kNone;              // block or root, held
    std::uint32_t context = 0;
    std::uint64_t epoch = 0;
    bool is_replaced = false;  // true if another fetch also brings some of the blocks
};

// Blocks of a prompt that no tier has, from the first one to the last one that a hit may include.
struct Missing {
    std::size_t first_block = 0;
    std::span<const Digest> digests;  // valid until the lease is granted or released
};

// The blocks of a prompt behind its hit, for models with auxiliary pools, where a hit may end only
// behind blocks for which the pools have copies.
struct Boundaries {
    std::size_t hit = 0;          // blocks
    std::size_t cached = 0;       // blocks in a tier, including those of the hit
    std::size_t first_block = 0;  // first block of the next two fields
    std::vector<Digest> digests;
    std::vector<std::uint8_t> may_end;  // 0: a hit that ends behind the block would cut an item
};

class Fetches {
  public:
    Fetches(const CoreConfig& config, Index& index, StoredBlocks& stored, const Matching& matching,
            Residency& residency, TransferLedger& transfers)
        : config_(config),
          index_(index),
          stored_(stored),
          matching_(matching),
          residency_(residency),
          transfers_(transfers) {}

    // Most blocks that one call of missing() returns. The call computes their digests, which takes
    // 0.5 us per block of 16 tokens without SHA instructions: so the call blocks the event loop for
    // 1 ms at most.
    static constexpr std::size_t kMostMissing = 2048;
    static constexpr std::size_t kMostMissingTokens = 16 * kMostMissing;

    // Returns the first `blocks` blocks of a matched lease that no tier has, or fewer; none without
    // stores. Call again for the following blocks when the returned ones are cached.
    Missing missing(Lease& lease, std::size_t blocks = kMostMissing);
    // Describes at most kMostMissing blocks from block `hit + skip` on, cached or not.
    Boundaries boundaries(Lease& lease, std::size_t skip);
    // Begins to fetch the first `blocks` missing blocks or fewer, or returns the fetch in flight
    // that brings the first one. Returns 0 if no block is missing or the host has no room.
    // `replaced`: a late fetch in flight, whose blocks are fetched again; the copy that arrives
    // first counts.
    TransferId begin(Lease& lease, std::size_t blocks, TransferId replaced);
    bool has(TransferId id) const { return fetches_.contains(id); }
    const Fetch& get(TransferId id) const { return fetches_.at(id); }
    // Ends a fetch. If it failed, its blocks before `first_bad` are proven.
    // Lets the fetches of some contexts insert no block.
    void purge(const std::vector<bool>& contexts);
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad);

    // Call when a lease is granted. Counts the blocks of its path that a fetch brought and that no
    // lease has hit before.
    void note_hits(Lease& lease);

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    struct HashDigest {
        std::size_t operator()(const Digest& digest) const {
            std::size_t hash;
            std::memcpy(&hash, digest.data(), sizeof(hash));
            return hash;
        }
    };

    bool may_fetch(const Lease& lease) const;
    std::size_t most() const {
        return std::clamp<std::size_t>(kMostMissingTokens / config_.block_tokens, 1, kMostMissing);
    }
    std::span<const Digest> digests_of(Lease& lease, const Matching::Frontier& cached,
                                       std::size_t end);
    void insert(const Fetch& fetch, std::uint32_t good_blocks);

    const CoreConfig& config_;
    Index& index_;
    StoredBlocks& stored_;
    const Matching& matching_;
    Residency& residency_;
    TransferLedger& transfers_;
    std::unordered_map<TransferId, Fetch> fetches_;                // in flight
    std::unordered_map<Digest, TransferId, HashDigest> by_block_;  // fetches in flight by digest
    std::uint64_t begun_ = 0;
    std::uint64_t fetched_ = 0;
    std::uint64_t unfetched_ = 0;
    std::uint64_t hit_blocks_ = 0;
};

}  // namespace aiokv
