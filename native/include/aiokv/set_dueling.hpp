// Set dueling: which order of eviction has more hits in one tier, recency, score, or score by
// label?
//
// Two shadow caches see each prompt: one evicts by recency, the other by score. For a large tier
// they see a sample of the stretches, chosen by fingerprint, and have the same share of its room.
// The tier follows the order that has counted more hits; see LeadTest. From the first label on, a
// third cache evicts by the scores of labels, and has to lead the order of the other two: labels
// that are wrong, or become wrong, cost at most one lead per change.
#pragma once

#include <optional>

#include "aiokv/shadow_cache.hpp"

namespace aiokv {

// A sequential test of which order hits more. Recency is followed first.
//
// The lead is what the other order has hit more since it was last not ahead. The order changes when
// the lead is greater than a floor, which stands for the hits that a change costs, and than
// kToScore or kToRecency standard deviations: those of the sum if each prompt could as well have
// had the opposite gain. So no few prompts decide, however large: a lead of k standard deviations
// takes more than k * k prompts. Each change starts from zero, so either order returns when it
// leads, whatever was counted before, and the scores cost at most one lead per change.
class LeadTest {
  public:
    static constexpr double kToScore = 3;    // standard deviations
    static constexpr double kToRecency = 2;  // lower, because recency is the default order

    // Adds the hits of one prompt by score minus those by recency.
    void add(double gain, double floor);
    bool prefers_score() const { return prefers_score_; }

  private:
    bool prefers_score_ = false;
    double lead_ = 0;
    double variance_ = 0;
};

class SetDueling {
  public:
    SetDueling(const ReuseModel& model, std::uint32_t capacity_blocks);

    // Accounts for the prompt that the model has observed last, with its classes.
    void observe(std::span<const ReuseClass> classes);
    // Call when the model has given a prompt a label. `classes`: with the label.
    void label(std::span<const ReuseClass> classes);
    EvictionRank preferred() const {
        return labels_test_.prefers_score() ? EvictionRank::kLabelledScore : without_labels();
    }
    void resize(std::uint32_t capacity_blocks);
    std::size_t bytes() const {
        return by_recency_.bytes() + by_score_.bytes() + (by_label_ ? by_label_->bytes() : 0);
    }

  private:
    EvictionRank without_labels() const {
        return test_.prefers_score() ? EvictionRank::kScore : EvictionRank::kRecency;
    }
    void sample(std::span<const ReuseClass> classes);
    std::uint32_t sampled_room() const { return room_ >> sample_shift_; }

    const ReuseModel& model_;
    std::uint32_t room_;          // capacity in stretches
    std::uint32_t sample_shift_;  // one stretch of 1 << sample_shift_ is in the sample
    ShadowCache by_recency_;
    ShadowCache by_score_;
    std::optional<ShadowCache> by_label_;  // after the first label
    LeadTest test_;                        // of score against recency
    LeadTest labels_test_;                 // of labels against the order that test_ prefers
    std::vector<std::uint64_t> keys_;      // the sample of a prompt
    std::vector<ReuseClass> classes_;
};

}  // namespace aiokv
