// Commit makes computed blocks matchable. Announcements let other leases wait for blocks that will
// be computed.
#pragma once

#include <cstdint>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/external_blocks.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/saver.hpp"
#include "aiokv/uses.hpp"

namespace aiokv {

class Publication {
  public:
    Publication(const CoreConfig& config, DevicePool& device, Index& index, RecurrentState& state,
                SlidingWindows& windows, Residency& residency, Saver& saver, Promises& promises,
                Uses& uses, ExternalBlocks& external)
        : config_(config),
          device_(device),
          index_(index),
          state_(state),
          windows_(windows),
          residency_(residency),
          saver_(saver),
          promises_(promises),
          uses_(uses),
          external_(external) {}

    // Offsets of the items count from the first position of the prompt.
    void append(Lease& lease, Tokens tokens, std::span<const Item> items);
    // Throws LeaseError, which names `call`, if this number of positions cannot be committed.
    void check_commit(const Lease& lease, const char* call, std::int64_t num_tokens) const;
    // Returns the number of blocks that became matchable. Throws LeaseError, changing nothing.
    std::uint32_t commit(Lease& lease, std::int64_t num_tokens, Step step);
    // Commits positions that were received from a peer and so belong to no step. Throws LeaseError,
    // changing nothing, if a block of these positions was not received.
    std::uint32_t commit_received(Lease& lease, std::int64_t num_tokens);
    // Indexes the computed, named, full blocks that are not indexed yet. Publishes nothing before
    // all onloads of the lease have arrived, because its own blocks depend on their bytes.
    std::uint32_t publish(Lease& lease);
    // Call after the last onload of the lease: publishes what commit() has deferred.
    void settle(Lease& lease);
    // Lets other leases wait for the blocks that this lease will publish next.
    void announce(Lease& lease);

    std::uint64_t computed_prompt_tokens() const { return computed_prompt_tokens_; }

    void add_to(CoreStatistics& statistics) const {
        statistics.published_blocks = published_;
        statistics.computed_tokens = computed_tokens_;
        statistics.computed_prompt_tokens = computed_prompt_tokens_;
    }

  private:
    const CoreConfig& config_;
    DevicePool& device_;
    Index& index_;
    RecurrentState& state_;
    SlidingWindows& windows_;
    Residency& residency_;
    Saver& saver_;
    Promises& promises_;
    Uses& uses_;
    ExternalBlocks& external_;
    std::uint64_t published_ = 0;
    std::uint64_t computed_tokens_ = 0;  // includes positions computed again after a preemption
    std::uint64_t computed_prompt_tokens_ = 0;
};

}  // namespace aiokv
