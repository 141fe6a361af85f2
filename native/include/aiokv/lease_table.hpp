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
    // Returns true if the lease is open and was not released.
    bool is_held(LeaseId id) const { return is_open(id) && !at(id).is(LeaseState::kReleasing); }
    // Throws LeaseError, which names `call`, when a lease is listed more than once. O(ids).
    void require_distinct(std::span<const LeaseId> ids, const char* call);
    // Throws UsageError when max_leases are open. Call it before any change.
    void require_room() const;

    // Opens a matched lease of these tokens with a new record. References to other leases stay
    // valid.
    Lease& open(std::span<const std::int32_t> tokens, std::uint32_t context, LeaseFlags flags);
    // Ends a lease that holds nothing any more. Requires an earlier transition to kFree.
    void close(Lease& lease);

    // The only place that changes a state. Throws InternalError, changing nothing, when the
    // transition is not allowed.
    void move(Lease& lease, LeaseState to);

    // Returns at most `limit` open leases among the first `max_records` records, the longest open
    // first.
    std::vector<const Lease*> oldest(std::size_t limit, std::size_t max_records) const;
    static double age_seconds(const Lease& lease);

    // Counts in O(1). A lease without a handle is not among open_leases().
    std::uint32_t open_leases() const;
    std::uint32_t count(LeaseState state) const { return counts_[static_cast<std::size_t>(state)]; }
    std::uint32_t with_blocks() const;
    std::uint32_t computing() const { return computing_; }  // leases with blocks and flags.computes

    // How long computing leases have had blocks.
    const Histogram& hold_times() const { return hold_times_; }

    // All records in a fixed order, including free ones.
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
    std::vector<std::uint32_t> listed_;  // by lease index: the last list that had the lease
    std::uint32_t list_ = 0;             // number of the last list of require_distinct()
};

const char* name_of(LeaseState state);

}  // namespace aiokv
