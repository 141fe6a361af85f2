// Commit: computed blocks become matchable; and promises of what will be.
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
    // Throws LeaseError, which names `call`: so many positions cannot be committed.
    void check_commit(const Lease& lease, const char* call, std::int64_t num_tokens) const;
    // Returns how many blocks became matchable. Throws LeaseError, changing nothing.
    std::uint32_t commit(Lease& lease, std::int64_t num_tokens, Step step);
    // The same for positions that were received from a peer: they belong to no step. Throws
    // LeaseError, changing nothing: a block of these positions was not received.
    std::uint32_t commit_received(Lease& lease, std::int64_t num_tokens);
    // Indexes the computed, named, full blocks that are not indexed yet. Nothing is published
    // before all that the lease was granted from other tiers has arrived: its own blocks depend on
    // it.
    std::uint32_t publish(Lease& lease);
    // The last onload of the lease has ended: what commit() has deferred is done.
    void settle(Lease& lease);
    // Other leases may wait for what this lease will publish next.
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
    std::uint64_t computed_tokens_ = 0;  // again after a preemption
    std::uint64_t computed_prompt_tokens_ = 0;
};

}  // namespace aiokv
