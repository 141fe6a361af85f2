// Sliding-window layers: groups of layers with block ids of their own, which are freed early.
//
//   table   | sink: ids | -1: behind the window | [first, end): ids | -1: not reached yet |
//                                                ^ computed is in here
//
// The sink is the first `head_blocks` entries (none, without sink_tokens); while `first` is inside
// it, nothing lies behind the window. A lease has at most `reach_blocks` ids of a group at a time,
// and that many are set aside for it when it is granted: the sink, the window, and what one step
// computes. So ids follow the computed positions without waiting and without fail: those behind the
// window pay for those ahead. Indexed blocks keep their ids, idle, until their ids are needed; a
// hit may end where the sink and a whole window are still there.
//
// With host copies (HostCopies), a block may also be in host memory instead. A grant copies it to
// an id of the lease, as a move; afterwards the id is the node's, unless that has one again. As
// long as such a move is in flight, the lease gives back no block behind its window. Ids that only
// a move needs are set aside, too: the sources of a save, and the targets of a lease that has
// ended.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/block_group.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

struct WindowGroup : BlockGroup {
    WindowGroup(const CoreConfig& config, GroupId number, Index& index, TransferLedger& transfers);

    // Number of ids that are not reserved for leases or moves.
    std::uint32_t spare() const { return pool.capacity() - reserved - in_flight; }
    // Returns true if the entry is a block of the sink, which stays as long as the lease has
    // blocks.
    bool is_sink(std::size_t index) const { return index < pool.head_blocks(); }

    std::uint32_t window_tokens;
    std::uint32_t reach_blocks;   // most ids of a lease at a time, including the sink
    std::uint32_t reserved = 0;   // for all leases together
    std::uint32_t in_flight = 0;  // ids that saves read, or that belong to a move without a lease
};

class SlidingWindows {
  public:
    SlidingWindows(const CoreConfig& config, Index& index, const LeaseTable& leases,
                   TransferLedger& transfers);

    bool exist() const { return !groups_.empty(); }
    const WindowGroup& group(std::size_t group) const { return groups_.at(group); }

    std::deque<WindowGroup>& groups() { return groups_; }

    // -- hits
    // Returns true if the host copies of a hit of the first `blocks` can be copied to the device
    // now, without waiting for an open step.
    bool can_onload(std::span<const NodeId> path, std::size_t blocks) const;

    // -- the tables of a lease
    // Throws UsageError if there is no such group.
    const std::vector<BlockId>& table_of(const Lease& lease, std::size_t group) const;
    // `given_up`: per group, number of reserved ids that are assumed to be free, because other
    // leases would give them up; or empty.
    bool has_room(const Lease& lease, std::uint32_t total_blocks,
                  std::span<const std::uint64_t> given_up = {}) const;
    void give_up(const Lease& lease, std::vector<std::uint64_t>& given_up) const;
    // -- from and to peers; see window_peers.cpp
    // Returns the blocks of the sink and of the window that a lease needs to compute behind
    // `num_tokens` positions, without those that it has computed completely.
    std::vector<std::uint32_t> missing_blocks(const Lease& lease, std::size_t group,
                                              std::uint32_t num_tokens) const;
    // Returns the blocks of the table that a lease needs to compute further.
    std::vector<std::uint32_t> needed_blocks(const Lease& lease, std::size_t group) const;
    // Gives the tables of the lease the ids that they have once `num_tokens` positions are
    // computed.
    void move_to(Lease& lease, std::uint32_t num_tokens, Step step);
    // Returns true if the reserved ids allow all leases to grow together.
    bool can_grow(std::span<const Growth> growths) const;
    // Returns true if a swapped lease still has its windows.
    bool is_kept(const Lease& lease) const { return lease.windows.size() == groups_.size(); }
    // Call with a grant, after the path is final and has_room() was true. A resumed lease still has
    // its ids.
    void take(Lease& lease);
    // Call when the table of the lease has changed its length.
    void fit(Lease& lease, Step step);
    // Call when blocks of the path from `first` on were indexed.
    void publish(Lease& lease, std::size_t first);
    // Call when computed_tokens has changed. Frees the blocks behind the window of the next
    // position, but not the sink.
    void advance(Lease& lease, Step step);
    void use_in(const Lease& lease, Step step);
    // Call when `step` computes the positions from computed_tokens to `end`. Transfers of their
    // blocks then wait for the step.
    void use_computed(const Lease& lease, std::uint32_t end, Step step);
    void release(Lease& lease, Step step);
    // Returns the number of positions that a step may compute now, because they have ids in every
    // group.
    std::uint32_t max_extend_tokens(const Lease& lease) const;

    // -- moves between the tiers
    // Begins to copy blocks of one group to host memory. Returns 0 if there is nothing to copy.
    // Copies only as many as there are spare ids, because an id that is being read cannot be given
    // to a lease.
    TransferId take_save();
    void orphan_move(Lease& lease, TransferId id, Step step);
    // Call after the end of a move. The first `good` blocks are proven.
    void finish_move(const Move& move, std::uint32_t good, bool failed);

    void check(Report& report) const;

  private:
    // Returns the number of ids of a group to reserve for a lease of `total_blocks` blocks.
    static std::uint32_t reserve_of(const WindowGroup& group, std::uint32_t total_blocks);
    void fit_group(WindowGroup& group, WindowTable& window, const Lease& lease, Step step);
    bool is_onloading(const Lease& lease, std::size_t group) const;
    void take_hit(WindowGroup& group, WindowTable& window, Lease& lease);
    void onload(WindowGroup& group, WindowTable& window, Lease& lease,
                std::span<const std::size_t> entries);
    template <class Visit>
    static void for_each_needed(const WindowGroup& group, std::size_t hits, Visit visit);
    std::uint32_t first_needed(const WindowGroup& group, std::uint32_t num_tokens) const;
    void fill(WindowGroup& group, WindowTable& window);
    static void drop(WindowGroup& group, WindowTable& window, std::size_t index, Step step);
    void check_group(Report& report, std::size_t group) const;

    const CoreConfig& config_;
    Index& index_;
    const LeaseTable& leases_;
    TransferLedger& transfers_;
    std::deque<WindowGroup> groups_;
};

}  // namespace aiokv
