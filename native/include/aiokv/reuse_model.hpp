// When do prefixes come back? The classes of what is cached, learned from a ghost list.
//
// A prompt is looked at in stretches of 512 tokens. The ghost list says which of them were asked
// for lately and how; the model counts who came back and ranks by that. See ReturnRates. For a
// large tier the list has a sample of the stretches, chosen by fingerprint; a stretch between two
// of the sample has the class of the second.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/ghost_list.hpp"
#include "aiokv/return_rates.hpp"

namespace aiokv {

class ReuseModel {
  public:
    // `capacity_blocks` is that of the largest tier.
    ReuseModel(std::uint32_t block_tokens, std::uint32_t capacity_blocks);

    // Account for a prompt: the class of each of its stretches, then of what follows them.
    void observe(std::span<const std::int32_t> tokens, std::uint64_t seed,
                 std::vector<ReuseClass>& classes);

    // Counts up whenever ages or scores may have changed; queues then sort their segments anew.
    std::uint64_t epoch() const { return epoch_; }
    // Blocks asked for, in units of a 64th of the capacity.
    std::uint64_t now() const { return now_; }
    std::uint32_t stretch_shift() const { return stretch_shift_; }

    // Fingerprints of the stretches of the prompt that was observed last. Tokens behind the last
    // full stretch count as a stretch with the probability of the share that they fill.
    std::span<const std::uint64_t> keys() const { return keys_; }
    std::uint32_t stretches_in(std::uint32_t blocks) const { return blocks >> stretch_shift_; }

    bool is_warm() const { return clock_ >= kWarmCapacities * capacity_; }
    // Higher: keep longer. `bucket` of the age.
    double score(ReuseClass reuse_class, std::uint32_t bucket) const {
        return rates_.score_in(reuse_class, bucket);
    }
    // The bucket of an age in units of now(), as the age will be halfway to the next epoch.
    std::uint32_t bucket_of(std::uint64_t age) const {
        return ReturnRates::bucket_of(age + epoch_blocks_ / unit_ / 2);
    }
    std::size_t bytes() const { return ghosts_.bytes(); }

  private:
    static constexpr std::uint64_t kWarmCapacities = 4;
    static constexpr std::uint32_t kStretchTokens = 512;
    static constexpr std::uint32_t kUnitsPerCapacity = 64;

    ReuseFeatures features_of(const GhostList::Entry& entry) const {
        return {entry.uses, entry.added - 1u, entry.gap};
    }
    void fingerprint(std::span<const std::int32_t> tokens, std::uint64_t seed);
    void find_known();
    void fingerprint_rest(std::span<const std::int32_t> tokens, std::uint64_t seed);
    ReuseFeatures first_use_of_rest();
    void close_epoch();
    void sweep(std::uint64_t blocks);

    std::uint32_t block_tokens_;
    std::uint32_t stretch_shift_;  // log2 of the blocks in a stretch
    std::uint64_t capacity_;
    std::uint64_t unit_;          // blocks asked for, that make one unit of time
    std::uint64_t epoch_blocks_;  // asked for between two epochs
    std::uint64_t clock_ = 0;     // blocks asked for
    std::uint64_t now_ = 0;       // clock_ in units
    std::uint64_t last_epoch_ = 0;
    std::uint64_t last_learnt_ = 0;
    std::uint64_t epoch_ = 0;

    std::uint32_t sample_shift_;  // one stretch of 1 << sample_shift_ is in the ghost list
    std::uint64_t sample_mask_;   // sampled keys have 0 in these bits

    GhostList ghosts_;
    ReturnRates rates_;
    std::vector<std::uint64_t> keys_;    // keys of the observed prompt
    std::vector<std::uint32_t> sample_;  // positions in keys_ of what the ghost list may know
    std::vector<GhostList::Entry*> known_;
};

}  // namespace aiokv
