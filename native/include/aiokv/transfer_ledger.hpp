// The ledger of what is in flight: copies between the tiers, and moves of auxiliary ids. It
// numbers and counts the transfers of the stores and of peers, too.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Report;

class TransferLedger {
  public:
    explicit TransferLedger(const PrefixTree& tree) : tree_(tree) {}

    // -- copies between the tiers
    TransferId begin(Transfer transfer);
    // Throws UsageError: no such transfer is in flight.
    const Transfer& get(TransferId id) const;
    // Removes a transfer that has ended. Throws InternalError: it ended twice, or never began.
    Transfer end(TransferId id);
    void join(TransferId id, LeaseId lease) { transfers_.at(id).leases.push_back(lease); }
    // An onload that no lease waits for any more is abandoned.
    void leave(TransferId id, LeaseId lease);
    // The transfer, or the move, is that of another lease now.
    void replace_lease(TransferId id, LeaseId from, LeaseId to);
    // The tail's blocks are the transfer's from now on (I3).
    void orphan_tail(TransferId id) { transfers_.at(id).orphaned = true; }

    void mark_cancelling(TransferId id);
    bool is_cancelling(TransferId id) const { return transfers_.at(id).cancelling; }
    bool is_saving() const;
    const std::unordered_map<TransferId, Transfer>& all() const { return transfers_; }
    std::uint32_t onloading_blocks() const;    // indexed ones that are being written on the device
    TransferId offload_of(NodeId node) const;  // 0: none
    // Throws InternalError: no onload writes the node, as kDeviceLoading says.
    TransferId onload_of(NodeId node) const;

    // -- moves of auxiliary ids: recurrent state and sliding windows
    TransferId begin_move(Move move);
    bool is_move(TransferId id) const { return moves_.contains(id); }
    const Move& move(TransferId id) const;  // throws UsageError
    Move end_move(TransferId id);
    // The targets are the move's from now on (I3). An orphan is abandoned.
    void orphan_move(TransferId id);
    bool has_moves() const { return !moves_.empty(); }
    const std::unordered_map<TransferId, Move>& moves() const { return moves_; }

    // -- those whose records other components have: Fetches, SaveQueue, PeerTransfers,
    // ExternalBlocks
    TransferId begin_other() {
        ++others_;
        return ++last_;
    }
    void end_other() {
        --others_;
        ++ended_;
    }

    // -- all
    // Onloads and moves whose last lease was released: worth cancelling where they have not begun.
    std::vector<TransferId> take_abandoned();
    std::size_t in_flight() const { return transfers_.size() + moves_.size() + others_; }
    bool has(TransferId id) const { return transfers_.contains(id) || is_move(id); }
    std::uint64_t ended() const { return ended_; }  // copies, so far

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    // Nodes with consecutive ids that one onload writes.
    struct Loading {
        NodeId end;
        TransferId transfer;
    };

    const PrefixTree& tree_;
    std::unordered_map<TransferId, Transfer> transfers_;
    std::map<NodeId, Loading> loading_;  // by the first of the nodes
    std::unordered_map<TransferId, Move> moves_;
    std::vector<TransferId> abandoned_;
    std::size_t others_ = 0;
    TransferId last_ = 0;
    std::uint64_t ended_ = 0;
};

}  // namespace aiokv
