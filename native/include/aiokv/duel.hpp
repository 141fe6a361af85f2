// Which order of eviction hits more in one tier: by recency or by score?
//
// Two shadow caches see each prompt: one evicts by recency, the other as the tier would if it
// trusted the scores. Those of a large tier see a sample of the stretches, chosen by fingerprint,
// and have room for the same share of the tier. The tier trusts them until the second cache has
// fallen measurably behind the first, and again when it is ahead by more than chance explains. So
// what the scores can cost is bounded by measured hits, whatever the model believes.
#pragma once

#include "aiokv/shadow_cache.hpp"

namespace aiokv {

class Duel {
  public:
    Duel(const ReuseModel& model, std::uint32_t capacity_blocks);

    // Account for the prompt that the model has observed last, with its classes.
    void observe(std::span<const ReuseClass> classes);
    bool prefers_score() const { return is_promising_ && is_trusted_; }
    void resize(std::uint32_t capacity_blocks);
    std::size_t bytes() const { return by_recency_.bytes() + by_score_.bytes(); }

  private:
    void sample(std::span<const ReuseClass> classes);
    void compare(double recent_hits, double scored_hits, double stretches);

    const ReuseModel& model_;
    std::uint32_t room_;          // stretches
    std::uint32_t sample_shift_;  // one stretch of 1 << sample_shift_ is in the sample
    ShadowCache by_recency_;
    ShadowCache by_score_;
    std::vector<std::uint64_t> keys_;  // the sample of a prompt
    std::vector<ReuseClass> classes_;
    std::uint64_t learnt_ = 0;
    bool is_promising_ = false;  // the model predicts that the scores will hit more
    bool is_trusted_ = true;     // the hits that were counted do not contradict it
    // In stretches; what was added earlier fades.
    double hits_ = 0;     // of the cache by recency
    double balance_ = 0;  // what the cache by score hit more while the tier followed it
    // Evidence against the order that the tier follows (a CUSUM test): what the other one has hit
    // more since it was last not ahead, and its variance if that were chance.
    double lead_ = 0;
    double variance_ = 0;
};

}  // namespace aiokv
