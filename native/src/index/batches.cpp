#include "aiokv/batches.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

BatchId Batches::begin(std::span<const LeaseId> ids) {
    leases_.require_distinct(ids, "computing");
    for (const LeaseId id : ids) {
        const Lease& lease = leases_.at(id);
        if (lease.is(LeaseState::kSwapping)) {
            throw LeaseError(
                "computing: a lease is being swapped to host memory; await preempt and resume it")
                .of(id);
        }
        if (!lease.has_blocks()) {
            throw LeaseError("computing: a lease is not allocated; call allocate first").of(id);
        }
    }
    for (const LeaseId id : ids) {
        Lease& lease = leases_.at(id);
        ++lease.batches;
        lease.step_is_exact = true;
    }
    batches_.emplace(++last_, std::vector<LeaseId>(ids.begin(), ids.end()));
    return last_;
}

std::vector<LeaseId> Batches::end(BatchId id, Step step) {
    const auto found = batches_.find(id);
    if (found == batches_.end()) {
        throw InternalError("batch " + std::to_string(id) + " has not begun, or has ended");
    }
    std::vector<LeaseId> leases = std::move(found->second);
    batches_.erase(found);
    std::erase_if(leases, [&](LeaseId lease_id) {
        Lease& lease = leases_.at(lease_id);
        lease.last_step = std::max(lease.last_step, step);
        --lease.batches;
        lease.covered_tokens = lease.num_tokens;
        return lease.is_in_use() || !lease.is(LeaseState::kReleasing);
    });
    return leases;
}

std::vector<BatchId> Batches::of(LeaseId id) const {
    std::vector<BatchId> ids;
    if (leases_.at(id).batches == 0) return ids;
    for (const auto& [batch, leases] : batches_) {
        if (std::find(leases.begin(), leases.end(), id) != leases.end()) ids.push_back(batch);
    }
    std::sort(ids.begin(), ids.end());
    return ids;
}

void Batches::hand_over(Lease& lease, Lease& keeper) {
    for (auto& [batch, leases] : batches_) {
        std::replace(leases.begin(), leases.end(), lease.id(), keeper.id());
    }
    keeper.batches = std::exchange(lease.batches, 0);
}

void Batches::share(const Lease& lease, Lease& keeper) {
    for (auto& [batch, leases] : batches_) {
        if (std::find(leases.begin(), leases.end(), lease.id()) == leases.end()) continue;
        leases.push_back(keeper.id());
        ++keeper.batches;
    }
}

void Batches::check(Report& report) const {
    std::unordered_map<LeaseId, std::uint32_t> counts;
    for (const auto& [batch, leases] : batches_) {
        for (const LeaseId id : leases) ++counts[id];
    }
    std::size_t counted = 0;
    for (const Lease& lease : leases_) {
        const auto found = counts.find(lease.id());
        const std::uint32_t batches = found == counts.end() ? 0 : found->second;
        counted += batches > 0;
        report.require(lease.batches == batches, "I3: a lease counts ", lease.batches,
                       " batches of ", batches);
        report.require(batches == 0 || lease.has_blocks(),
                       "I3: a batch computes with a lease that holds no blocks");
        report.require(!lease.is(LeaseState::kReleasing) || lease.is_in_use(),
                       "I3: a releasing lease waits for no batch, and for no transfer of a peer");
    }
    report.require(counted == counts.size(), "I3: batches name ", counts.size(), " leases, ",
                   counted, " are known");
}

}  // namespace aiokv
