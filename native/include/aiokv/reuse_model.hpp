// When do prefixes return? Classes of cached stretches, learned from a ghost list.
//
// A prompt is divided into stretches of 512 tokens. The ghost list records which stretches were
// requested lately and how; the model counts which of them returned, and ranks the classes by that.
// See ReturnRates. For a large tier, the list has a sample of the stretches, chosen by fingerprint;
// a stretch between two of the sample has the class of the second.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/ghost_list.hpp"
#include "aiokv/return_rates.hpp"

namespace aiokv {

class ReuseModel {
  public:
    // `capacity_blocks`: capacity of the largest tier.
    ReuseModel(std::uint32_t block_tokens, std::uint32_t capacity_blocks);

    // Accounts for a prompt. Sets `classes` to the class of each stretch, and then that of the
    // tokens behind the last stretch.
    void observe(std::span<const std::int32_t> tokens, std::uint64_t seed,
                 std::vector<ReuseClass>& classes);
    // Gives the stretches of an observed prompt, which has ended, a label: in `classes`, which
    // observe() has set, and in the ghost list. The first call begins to learn rates by label,
    // beside those without.
    void label(std::span<const std::int32_t> tokens, std::uint64_t seed, std::uint32_t label,
               std::span<ReuseClass> classes);

    // Number that increases whenever ages or scores may have changed; queues then order their
    // cohorts again.
    std::uint64_t epoch() const { return epoch_; }
    // Time: requested blocks, in units of 1/64 of the capacity.
    std::uint64_t now() const { return now_; }
    std::uint32_t stretch_shift() const { return stretch_shift_; }

    // Fingerprints of the stretches of the last observed prompt. Tokens behind the last full
    // stretch count as one with a probability equal to the share that they fill.
    std::span<const std::uint64_t> keys() const { return keys_; }
    std::uint32_t stretches_in(std::uint32_t blocks) const { return blocks >> stretch_shift_; }

    bool is_warm() const { return clock_ >= kWarmCapacities * capacity_; }
    bool has_labels() const { return labelled_rates_.has_value(); }
    // Returns the scores of a class by bucket of age: blocks with a higher score are kept longer.
    // `by_label`: only if has_labels().
    const ReturnRates::Ages& scores(ReuseClass reuse_class, bool by_label) const {
        if (by_label) return labelled_rates_->scores(reuse_class);
        return rates_.scores(ReuseFeatures::with_label(reuse_class, 0));
    }
    double score(ReuseClass reuse_class, std::uint32_t bucket, bool by_label = false) const {
        return scores(reuse_class, by_label)[bucket];
    }
    // Returns the bucket of an age in units of now(), as that age will be halfway to the next
    // epoch.
    std::uint32_t bucket_of(std::uint64_t age) const {
        return ReturnRates::bucket_of(age + epoch_blocks_ / unit_ / 2);
    }
    std::size_t bytes() const {
        return ghosts_.bytes() + rates_.bytes() + (labelled_rates_ ? labelled_rates_->bytes() : 0);
    }

  private:
    static constexpr std::uint64_t kWarmCapacities = 4;
    static constexpr std::uint32_t kStretchTokens = 512;
    static constexpr std::uint32_t kUnitsPerCapacity = 64;

    ReuseFeatures features_of(const GhostList::Entry& entry) const {
        return {entry.uses, entry.added - 1u, entry.gap};
    }
    ReuseFeatures with_label(ReuseFeatures features, const GhostList::Entry& entry) const {
        features.label = ghosts_.label_of(entry);
        return features;
    }
    void fingerprint(std::span<const std::int32_t> tokens, std::uint64_t seed);
    void find_known();
    void fingerprint_rest(std::span<const std::int32_t> tokens, std::uint64_t seed);
    ReuseFeatures first_use_of_rest();
    void learn(ReturnRates& rates, std::uint64_t& learnt, std::uint64_t least_blocks);
    void close_epoch();
    void sweep(std::uint64_t blocks);

    std::uint32_t block_tokens_;
    std::uint32_t stretch_shift_;  // log2 of the blocks in a stretch
    std::uint64_t capacity_;
    std::uint64_t unit_;          // requested blocks per unit of time
    std::uint64_t epoch_blocks_;  // requested blocks per epoch
    std::uint64_t clock_ = 0;     // requested blocks
    std::uint64_t now_ = 0;       // clock_ in units
    std::uint64_t last_epoch_ = 0;
    std::uint64_t last_learnt_ = 0;
    std::uint64_t labels_learnt_ = 0;
    std::uint64_t epoch_ = 0;

    std::uint32_t sample_shift_;  // one stretch of 1 << sample_shift_ is in the ghost list
    std::uint64_t sample_mask_;   // sampled keys have 0 in these bits

    GhostList ghosts_;
    ReturnRates rates_;                          // of all labels together
    std::optional<ReturnRates> labelled_rates_;  // after the first label
    std::vector<std::uint64_t> keys_;            // keys of the observed prompt
    std::vector<std::uint32_t> sample_;  // positions in keys_ of the stretches in the sample
    std::vector<GhostList::Entry*> known_;
};

}  // namespace aiokv
