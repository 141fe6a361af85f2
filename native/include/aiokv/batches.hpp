// Batches of compute in flight, and the leases that they compute with.
//
// A batch ends when the host knows that its work has finished, or when its work belongs to a step,
// whose event covers it. Batches end in any order. Releases says what a lease does that gives
// blocks back before its batches have ended.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/lease_table.hpp"

namespace aiokv {

class Batches {
  public:
    explicit Batches(LeaseTable& leases) : leases_(leases) {}

    // Throws LeaseError, changing nothing, unless all leases have blocks and stay on the device.
    BatchId begin(std::span<const LeaseId> ids);
    // `step`: step that includes the batch's work, or 0. Returns the releasing leases that waited
    // only for this batch.
    std::vector<LeaseId> end(BatchId id, Step step);
    // The batches of one lease, in ascending order.
    std::vector<BatchId> of(LeaseId id) const;

    // Moves the batches of `lease` to `keeper`.
    void hand_over(Lease& lease, Lease& keeper);
    // Adds the batches of `lease` to those of `keeper`.
    void share(const Lease& lease, Lease& keeper);

    void check(Report& report) const;

  private:
    LeaseTable& leases_;
    std::unordered_map<BatchId, std::vector<LeaseId>> batches_;
    BatchId last_ = 0;
};

}  // namespace aiokv
