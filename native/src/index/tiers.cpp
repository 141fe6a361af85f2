#include "aiokv/tiers.hpp"

#include <algorithm>
#include <string>

#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

void Tiers::require_idle(const char* tier, bool swapped_too) const {
    const auto in_use = std::find_if(leases_.begin(), leases_.end(), [&](const Lease& lease) {
        return lease.has_blocks() || (swapped_too && lease.is(LeaseState::kSwapped));
    });
    if (in_use == leases_.end() && transfers_.in_flight() == 0) return;
    UsageError error("cannot forget the " + std::string(tier) + " tier: " +
                     std::to_string(transfers_.in_flight()) + " transfers are in flight, " +
                     (in_use == leases_.end() ? "no lease" : "a lease") + " holds blocks");
    throw error.of(in_use == leases_.end() ? 0 : in_use->id())
        .hint("release the leases, and wait for the transfers");
}

void Tiers::forget_device() {
    // A swapped lease still has its recurrent state and windows on the device.
    require_idle("device", auxiliary_.exist());
    auxiliary_.forget_device();
    residency_.forget_device();
}

void Tiers::forget_host() {
    require_idle("host", true);
    auxiliary_.forget_host();
    residency_.forget_host();
}

void Tiers::reset(bool new_weights) {
    index_.begin_epoch();
    saver_.forget_queue();
    store_saver_.forget_queue();
    promises_.clear();  // no open lease will publish what it promised
    for (Lease& lease : leases_) lease.frontier = kNone;
    residency_.detach_all(new_weights);
    index_.close_unused_contexts();
    for (Lease& lease : leases_) {
        if (lease.is(LeaseState::kSwapped)) swaps_.trim(lease);
    }
}

void Tiers::purge(const std::vector<bool>& contexts) {
    const auto is_purged = [&](const Lease& lease) {
        return (lease.is_open() || lease.is(LeaseState::kReleasing)) && contexts[lease.context];
    };
    for (Lease& lease : leases_) {
        if (!is_purged(lease)) continue;
        promises_.withdraw(lease);
        lease.flags.reads = lease.flags.writes = false;
        lease.epoch = 0;
    }
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        if (contexts[i]) residency_.drop_context(index_.root_of(i));
    }
    index_.change();
    for (Lease& lease : leases_) {
        if (lease.is(LeaseState::kSwapped) && is_purged(lease)) swaps_.trim(lease);
    }
}

void Tiers::resize_device(std::int64_t blocks) {
    if (blocks <= static_cast<std::int64_t>(config_.reserve_blocks) || blocks > kMaxBlocks) {
        throw UsageError("cannot resize the device pool to " + std::to_string(blocks) +
                         " blocks: it must be between reserve_blocks + 1 (" +
                         str(std::uint64_t{config_.reserve_blocks} + 1) + ") and " +
                         str(kMaxBlocks))
            .field("reserve_blocks");
    }
    if (device_.cooling_blocks() > 0 && blocks < device_.capacity()) {
        throw UsageError("cannot shrink the device pool while " + str(device_.cooling_blocks()) +
                         " freed blocks wait for their step")
            .field("device_blocks")
            .hint("resize again when that step has finished");
    }
    // A pending resize is tried again at each release. So scan the nodes only when a transfer or a
    // step has ended, and begin with the lease that prevented the last attempt.
    const ResizeTry attempt{blocks, transfers_.ended(), device_.finished_step()};
    if (attempt == refused_resize_) {
        throw UsageError("cannot resize the device pool to " + std::to_string(blocks) +
                         " blocks: the transfers or steps of the last try are not over")
            .field("device_blocks")
            .hint("resize again when one of them has ended");
    }
    const auto is_beyond = [&](BlockId id) { return id >= blocks; };
    const auto& leases = leases_.records();
    for (std::size_t i = 0; i < leases.size(); ++i) {
        const std::size_t index = (resize_from_ + i) % leases.size();
        const std::vector<BlockId>& table = leases[index].table;
        const auto held = std::find_if(table.begin(), table.end(), is_beyond);
        if (held == table.end()) continue;
        resize_from_ = index;
        throw resize_refused(device_.capacity(), static_cast<std::uint32_t>(blocks), *held,
                             "leased")
            .of(leases[index].id());
    }
    refused_resize_ = attempt;
    residency_.resize_device(static_cast<std::uint32_t>(blocks));
    refused_resize_ = {};
}

}  // namespace aiokv
