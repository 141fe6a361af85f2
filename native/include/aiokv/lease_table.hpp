// All leases by id, and the transitions of their states.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "aiokv/histogram.hpp"
#include "aiokv/lease.hpp"

namespace aiokv {

class Report;

class LeaseTable {
  public:
    // At most `max_leases` are open at a time.
    explicit LeaseTable(std::uint32_t max_leases) : max_leases_(max_leases) {}

    LeaseTable(const LeaseTable&) = delete;
    LeaseTable& operator=(const LeaseTable&) = delete;

    // Throw LeaseError when the lease is closed, or the id was never given out.
    const Lease& at(LeaseId id) const;
    Lease& at(LeaseId id);
    bool is_open(LeaseId id) const;
    // Open, and not released while batches or transfers keep its blocks.
    bool is_held(LeaseId id) const { return is_open(id) && !at(id).is(LeaseState::kReleasing); }
    // Throws LeaseError, which names `call`, when a lease is listed more than once. O(ids).
    void require_distinct(std::span<const LeaseId> ids, const char* call);
    // Throws UsageError when max_leases are open. Call it before any change.
    void require_room() const;

    // A matched lease of these tokens, which starts with a clean record. References to other leases
    // stay valid.
    Lease& open(std::span<const std::int32_t> tokens, std::uint32_t context, LeaseFlags flags);
    // The lease holds nothing any more, and ends. Requires a transition to kFree before.
    void close(Lease& lease);

    // The only place that changes a state. Throws InternalError, changing nothing, when the
    // transition is not allowed.
    void move(Lease& lease, LeaseState to);

    // Open leases among the first `max_records` records, the longest open first; at most `limit`.
    std::vector<const Lease*> oldest(std::size_t limit, std::size_t max_records) const;
    static double age_seconds(const Lease& lease);

    // Counts in O(1). A lease without a handle is not among open_leases().
    std::uint32_t open_leases() const;
    std::uint32_t count(LeaseState state) const { return counts_[static_cast<std::size_t>(state)]; }
    std::uint32_t with_blocks() const;
    std::uint32_t computing() const { return computing_; }  // with blocks, and flags.computes

    // For how long leases that compute had blocks.
    const Histogram& hold_times() const { return hold_times_; }

    // Every record, those of no lease too, in a fixed order.
    const std::deque<Lease>& records() const { return leases_; }
    auto begin() { return leases_.begin(); }
    auto end() { return leases_.end(); }
    auto begin() const { return leases_.begin(); }
    auto end() const { return leases_.end(); }

    void check(Report& report) const;

  private:
    std::uint32_t max_leases_;
    std::deque<Lease> leases_;
    std::vector<std::uint32_t> free_;
    std::array<std::uint32_t, kLeaseStates> counts_{};  // open leases by state
    std::uint32_t computing_ = 0;
    Histogram hold_times_;
    std::vector<std::uint32_t> listed_;  // by index of the lease: the last list that has named it
    std::uint32_t list_ = 0;             // number of the last list of require_distinct()
};

const char* name_of(LeaseState state);

}  // namespace aiokv
