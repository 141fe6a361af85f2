// When host blocks are saved to the stores: once they are in host memory, at the n-th use, or
// before their eviction.
//
// A save reads host copies, which are held and owned until it has ended (I3). No request waits for
// a save: blocks beyond the bound of the queue, and blocks that are evicted first, are not saved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/reuse_sketch.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

struct Save {
    std::vector<NodeId> nodes;  // held
    std::vector<BlockId> host_blocks;
    std::vector<Digest> digests;
};

// Of one block of a save, as the worker reports it.
enum class SaveResult : std::uint8_t { kDone, kMissing, kWrong, kRefused, kFailed };

class StoreSaver {
  public:
    static constexpr std::size_t kMaxBlocks = 256;  // of a save
    static constexpr std::size_t kMaxInFlight = 4;  // saves

    StoreSaver(const CoreConfig& config, PrefixTree& tree, const RunPool& host,
               StoredBlocks& stored, Residency& residency, TransferLedger& transfers);

    // These blocks have got a host copy from the device.
    void note_host_copies(std::span<const NodeId> nodes);
    // A lease is granted that hits this path; Saver has counted the use of its first `resident`
    // blocks.
    void note_uses(const Lease& lease, std::size_t resident);

    // take() may find blocks to save. Constant time.
    bool wants_saves() const;
    // Begins a save of the blocks that are due, at most kMaxBlocks. 0: none, or enough in flight.
    TransferId take();
    bool has(TransferId id) const { return saves_.contains(id); }
    const Save& get(TransferId id) const { return saves_.at(id); }
    // `results`: one per block, or empty: all have the result that `outcome` says. Throws
    // UsageError, changing nothing, on another number of results.
    void complete(TransferId id, Outcome outcome, std::span<const std::uint8_t> results);
    // A reset: nothing that waits is indexed any more.
    void forget_queue() { queue_.clear(); }

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    void queue(NodeId node);
    bool can_save(NodeId node) const;
    bool admit(NodeId node);
    std::uint32_t ahead_blocks() const;
    std::vector<NodeId> take_queued();
    std::vector<NodeId> look_ahead();

    const CoreConfig& config_;
    PrefixTree& tree_;
    const RunPool& host_;
    StoredBlocks& stored_;
    Residency& residency_;
    TransferLedger& transfers_;
    std::optional<ReuseSketch> offered_;  // none: each block is admitted
    std::deque<NodeId> queue_;            // nodes with kSaveQueued; stale entries lack the flag
    std::unordered_map<TransferId, Save> saves_;  // in flight
    std::uint64_t saved_ = 0;
    std::uint64_t dropped_ = 0;
    std::uint64_t rejected_ = 0;
    std::uint64_t refused_ = 0;
    std::uint64_t failed_ = 0;
};

}  // namespace aiokv
