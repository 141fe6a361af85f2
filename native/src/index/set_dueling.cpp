#include "aiokv/set_dueling.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace aiokv {
namespace {

// Chosen with tests/harness/trace_families.py, seeds below 200, like the constants of LeadTest.
constexpr double kSwitchCost = 0.125;  // hits that a change costs, as a share of the capacity
constexpr std::uint32_t kSampledRoom = 1024;  // least capacity of a shadow cache in stretches

std::uint32_t sample_shift_of(std::uint32_t room) {
    return std::max<int>(0, std::bit_width(room / kSampledRoom) - 1);
}

}  // namespace

void LeadTest::add(double gain, double floor) {
    lead_ = std::max(0.0, lead_ + (prefers_score_ ? -gain : gain));
    variance_ = lead_ > 0 ? variance_ + gain * gain : 0;
    const double deviations = prefers_score_ ? kToRecency : kToScore;
    if (lead_ <= std::max(floor, deviations * std::sqrt(variance_))) return;
    prefers_score_ = !prefers_score_;
    lead_ = variance_ = 0;
}

SetDueling::SetDueling(const ReuseModel& model, std::uint32_t capacity_blocks)
    : model_(model),
      room_(model.stretches_in(capacity_blocks)),
      sample_shift_(sample_shift_of(room_)),
      by_recency_(sampled_room(), nullptr),
      by_score_(sampled_room(), &model) {}

void SetDueling::resize(std::uint32_t capacity_blocks) {
    room_ = model_.stretches_in(capacity_blocks);
    by_recency_.resize(sampled_room());
    by_score_.resize(sampled_room());
    if (by_label_) by_label_->resize(sampled_room());
}

void SetDueling::sample(std::span<const ReuseClass> classes) {
    keys_.clear();
    classes_.clear();
    const auto keys = model_.keys();
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if ((keys[i] & 0xffffffff) >> (32 - sample_shift_) != 0) continue;
        keys_.push_back(keys[i]);
        classes_.push_back(classes[i]);
    }
}

void SetDueling::label(std::span<const ReuseClass> classes) {
    if (model_.keys().size() > room_) return;
    if (!by_label_) by_label_.emplace(sampled_room(), &model_);
    sample(classes);
    by_label_->reclassify(keys_, classes_);
}

void SetDueling::observe(std::span<const ReuseClass> classes) {
    by_score_.choose(model_.is_warm() ? EvictionRank::kScore : EvictionRank::kRecency);
    if (by_label_ && model_.is_warm()) by_label_->choose(EvictionRank::kLabelledScore);
    if (model_.keys().size() > room_) return;
    sample(classes);
    const double recent_hits = by_recency_.use(keys_, classes_);
    const double scored_hits = by_score_.use(keys_, classes_);
    const double floor = kSwitchCost * sampled_room();
    test_.add(scored_hits - recent_hits, floor);
    if (!by_label_) return;
    const double other_hits = without_labels() == EvictionRank::kScore ? scored_hits : recent_hits;
    labels_test_.add(by_label_->use(keys_, classes_) - other_hits, floor);
}

}  // namespace aiokv
