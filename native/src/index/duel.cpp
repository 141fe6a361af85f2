#include "aiokv/duel.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace aiokv {
namespace {

// Chosen on the tuning families of aiokv/trace/families.py, seeds below 200.
constexpr double kPromise = 0.015;  // predicted gain, a share of LRU's hits, that starts a try
constexpr double kToleratedLoss = 0.005;  // a share of LRU's hits; then the scores are not followed
constexpr double kSignificance = 3;       // standard deviations that the other order must lead by
constexpr double kMemoryCapacities = 64;  // asked for, until a count has faded
constexpr std::uint32_t kSampledRoom = 256;  // stretches that fit a shadow cache, at least

std::uint32_t sample_shift_of(std::uint32_t room) {
    return std::max<int>(0, std::bit_width(room / kSampledRoom) - 1);
}

}  // namespace

Duel::Duel(const ReuseModel& model, std::uint32_t capacity_blocks)
    : model_(model),
      room_(model.stretches_in(capacity_blocks)),
      sample_shift_(sample_shift_of(room_)),
      by_recency_(room_ >> sample_shift_, nullptr),
      by_score_(room_ >> sample_shift_, &model) {}

void Duel::resize(std::uint32_t capacity_blocks) {
    room_ = model_.stretches_in(capacity_blocks);
    by_recency_.resize(room_ >> sample_shift_);
    by_score_.resize(room_ >> sample_shift_);
}

void Duel::sample(std::span<const ReuseClass> classes) {
    keys_.clear();
    classes_.clear();
    const auto keys = model_.keys();
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if ((keys[i] & 0xffffffff) >> (32 - sample_shift_) != 0) continue;
        keys_.push_back(keys[i]);
        classes_.push_back(classes[i]);
    }
}

void Duel::observe(std::span<const ReuseClass> classes) {
    if (learnt_ != model_.learnt()) {
        learnt_ = model_.learnt();
        is_promising_ =
            model_.is_warm() && model_.predicted_gain(room_) > (is_promising_ ? 0 : kPromise);
    }
    by_score_.choose(is_promising_);
    const std::size_t stretches = model_.keys().size();
    if (stretches == 0 || stretches > room_) return;
    sample(classes);
    const double recent_hits = by_recency_.use(keys_, classes_);
    const double scored_hits = by_score_.use(keys_, classes_);
    compare(recent_hits, scored_hits, static_cast<double>(stretches));
}

void Duel::compare(double recent_hits, double scored_hits, double stretches) {
    const double keep = std::exp(-stretches / (kMemoryCapacities * room_));
    const double gain = scored_hits - recent_hits;
    const bool follows_score = prefers_score();
    hits_ = hits_ * keep + recent_hits;
    balance_ = balance_ * keep + (follows_score ? gain : 0);
    lead_ = std::max(0.0, lead_ + (follows_score ? -gain : gain));
    variance_ = lead_ > 0 ? variance_ + gain * gain : 0;
    const bool is_overtaken = lead_ > kSignificance * std::sqrt(variance_);
    const bool is_costly = follows_score && balance_ < -kToleratedLoss * hits_;
    if (!is_overtaken && !is_costly) return;
    is_trusted_ = !follows_score;
    lead_ = variance_ = 0;
}

}  // namespace aiokv
