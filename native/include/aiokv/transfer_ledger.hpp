// The ledger of copies between the tiers and of moves of auxiliary ids in flight. It also numbers
// and counts the transfers of stores and peers.
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
    // Throws UsageError if no such transfer is in flight.
    const Transfer& get(TransferId id) const;
    // Removes and returns a transfer that has ended. Throws InternalError if it is not in flight.
    Transfer end(TransferId id);
    void join(TransferId id, LeaseId lease) { transfers_.at(id).leases.push_back(lease); }
    // Removes a lease from a transfer. An onload without leases is abandoned.
    void leave(TransferId id, LeaseId lease);
    // Moves the transfer, or the move, from one lease to another.
    void replace_lease(TransferId id, LeaseId from, LeaseId to);
    // Gives the blocks of the tail to the transfer (I3).
    void orphan_tail(TransferId id) { transfers_.at(id).orphaned = true; }

    void mark_cancelling(TransferId id);
    bool is_cancelling(TransferId id) const { return transfers_.at(id).cancelling; }
    bool is_saving() const;
    const std::unordered_map<TransferId, Transfer>& all() const { return transfers_; }
    std::uint32_t onloading_blocks() const;    // indexed blocks being written on the device
    TransferId offload_of(NodeId node) const;  // 0: none
    // Throws InternalError: no onload writes the node, as kDeviceLoading says.
    TransferId onload_of(NodeId node) const;

    // -- moves of auxiliary ids: recurrent state and sliding windows
    TransferId begin_move(Move move);
    bool is_move(TransferId id) const { return moves_.contains(id); }
    const Move& move(TransferId id) const;  // throws UsageError
    Move end_move(TransferId id);
    // Gives the targets to the move (I3), which is abandoned.
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
    // Returns the onloads and moves without a lease since the last call. Those that have not begun
    // are worth cancelling.
    std::vector<TransferId> take_abandoned();
    std::size_t in_flight() const { return transfers_.size() + moves_.size() + others_; }
    bool has(TransferId id) const { return transfers_.contains(id) || is_move(id); }
    std::uint64_t ended() const { return ended_; }  // number of copies that have ended

    void add_to(GroupStatistics& attention) const;
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
