// Saves of host blocks of attention to the stores.
//
// A save reads host copies. Until its end, the blocks are held, and so their host ids are kept
// (I3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/save_queue.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// Host copies of attention by their nodes; see SaveQueue.
class HostNodes {
  public:
    using Key = NodeId;

    HostNodes(const CoreConfig& config, const PrefixTree& tree, const RunPool& host,
              StoredBlocks& stored, Residency& residency)
        : config_(config), tree_(tree), host_(host), stored_(stored), residency_(residency) {}

    bool is_live(NodeId node) const { return tree_.is_live(node); }
    bool is_indexed(NodeId node) const { return is_live(node) && !tree_[node].has(kDetached); }
    bool exists(NodeId node) const { return is_indexed(node) && tree_[node].has(kHostValid); }
    NodeId node_of(NodeId node) const { return node; }
    BlockId host_id(NodeId node) const { return tree_[node].host; }
    bool has(NodeId node, std::uint8_t flags) const { return stored_.has(node, flags); }
    void set(NodeId node, std::uint8_t flags) { residency_.set_store_flags(node, flags); }
    void clear(NodeId node, std::uint8_t flags) { stored_.clear(node, flags); }
    bool wants_look_ahead() const { return ahead_blocks() > 0; }
    std::vector<NodeId> next_evicted() { return residency_.next_on_host(ahead_blocks()); }
    void begin_save(std::span<const NodeId> nodes) { residency_.begin_save(nodes); }
    void finish_save(std::span<const NodeId> nodes) { residency_.finish_save(nodes); }
    template <class Visit>
    void for_each(Visit visit) const {
        for (NodeId node = 0; node < tree_.end_id(); ++node) {
            if (is_live(node)) visit(node);
        }
    }

  private:
    // Number of host blocks to check before their eviction, besides the free ones.
    std::uint32_t ahead_blocks() const {
        const std::uint32_t ahead = config_.stores.ahead_blocks;
        return ahead - std::min(ahead, host_.free_blocks());
    }

    const CoreConfig& config_;
    const PrefixTree& tree_;
    const RunPool& host_;
    StoredBlocks& stored_;
    Residency& residency_;
};

class StoreSaver {
  public:
    StoreSaver(const CoreConfig& config, PrefixTree& tree, const RunPool& host,
               StoredBlocks& stored, Residency& residency, TransferLedger& transfers)
        : tree_(tree),
          stored_(stored),
          residency_(residency),
          saves_(config, tree, stored, transfers, {config, tree, host, stored, residency},
                 {256, 4}) {}

    // Call when these blocks have got a host copy from the device.
    void note_host_copies(std::span<const NodeId> nodes);
    // Call when a lease that hits this path is granted. Saver has counted the use of its first
    // `resident` blocks.
    void note_uses(const Lease& lease, std::size_t resident);

    bool wants_saves() const { return stored_.exist() && saves_.wants_saves(); }
    // Begins a save of the blocks that are due. Returns 0 if there are none, or enough saves in
    // flight.
    TransferId take() { return wants_saves() ? saves_.take() : 0; }
    bool has(TransferId id) const { return saves_.has(id); }
    const StoreTransfer& get(TransferId id) const { return saves_.get(id); }
    // See SaveQueue::complete().
    void complete(TransferId id, Outcome outcome, std::span<const std::uint8_t> results) {
        saves_.complete(id, outcome, results);
    }
    // Call at a reset: drops the queue, because no queued block is indexed any more.
    void forget_queue() { saves_.forget_queue(); }

    void add_to(GroupStatistics& attention) const;
    void check(Report& report) const;

  private:
    PrefixTree& tree_;
    const StoredBlocks& stored_;
    const Residency& residency_;
    SaveQueue<HostNodes> saves_;
};

}  // namespace aiokv
