// Why blocks of a prompt were not hit: found at the grant of a lease, and kept with the lease.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "aiokv/core_types.hpp"
#include "aiokv/index.hpp"
#include "aiokv/promises.hpp"

namespace aiokv {

class Misses {
  public:
    Misses(const CoreConfig& config, const Index& index, const Promises& promises)
        : config_(config), index_(index), promises_(promises) {}

    // Sets `missed` of a lease that is being granted to the causes of its blocks from the hit to
    // `limit`, the end of the blocks that a hit may have. Does nothing without a history.
    void explain(Lease& lease, std::size_t limit);

    // The first token that differs from all known prefixes, and that of the longest known one.
    struct Divergence {
        std::uint32_t position;
        std::int32_t token;
        std::int32_t known_token;
    };
    // Returns nothing if the known prefixes behind the block have been forgotten.
    std::optional<Divergence> divergence(const Lease& lease, const MissedRun& run) const;

    void add_to(CoreStatistics& statistics) const { statistics.missed_tokens = tokens_; }

  private:
    struct Place {
        NodeId node;             // last block that is in the tree or the history
        std::size_t block;       // first block behind it
        bool is_in_run = false;  // an evicted run continues behind it
    };
    const std::int32_t* tokens_of(const Lease& lease, std::size_t block) const {
        return &lease.tokens[block * config_.block_tokens];
    }
    Place follow_tree(Place place, const Lease& lease, std::size_t limit) const;
    template <class Visit>
    Place follow_history(Place place, const Lease& lease, std::size_t limit, Visit visit) const;
    MissedRun other_context(const Lease& lease, std::size_t first, std::size_t limit) const;
    template <class Visit>
    void for_some_behind(NodeId known, Visit visit) const;
    bool continues_with(NodeId known, std::span<const std::int32_t> tokens) const;
    bool has_other_items(const Lease& lease, Place place) const;
    bool is_known_end(const Lease& lease, Place place) const;

    const CoreConfig& config_;
    const Index& index_;
    const Promises& promises_;
    MissCounts tokens_{};
};

}  // namespace aiokv
