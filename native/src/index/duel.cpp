#include "aiokv/duel.hpp"

#include <algorithm>
#include <cmath>

namespace aiokv {
namespace {

// Chosen on the families and seeds that aiokv/trace/families.py names for it.
constexpr double kPromise = 0.015;  // predicted gain, a share of LRU's hits, that starts a try
constexpr double kToleratedLoss = 0.005;  // a share of LRU's hits; then the scores lose trust
constexpr double kSignificance = 3;       // standard deviations ahead that regain it
constexpr double kMemoryCapacities = 64;  // asked for, until a count has faded

}  // namespace

Duel::Duel(const ReuseModel& model, std::uint32_t capacity_blocks)
    : model_(model),
      room_(model.stretches_in(capacity_blocks)),
      by_recency_(room_, nullptr),
      by_score_(room_, &model) {}

void Duel::resize(std::uint32_t capacity_blocks) {
    room_ = model_.stretches_in(capacity_blocks);
    by_recency_.resize(room_);
    by_score_.resize(room_);
}

void Duel::observe(std::span<const ReuseClass> classes) {
    if (learnt_ != model_.learnt()) {
        learnt_ = model_.learnt();
        is_promising_ =
            model_.is_warm() && model_.predicted_gain(room_) > (is_promising_ ? 0 : kPromise);
    }
    by_score_.choose(is_promising_);
    const auto keys = model_.keys();
    if (keys.empty() || keys.size() > room_) return;
    const double recent_hits = by_recency_.use(keys, classes);
    compare(recent_hits, by_score_.use(keys, classes), static_cast<double>(keys.size()));
}

void Duel::compare(double recent_hits, double scored_hits, double stretches) {
    const double keep = std::exp(-stretches / (kMemoryCapacities * room_));
    const double gain = scored_hits - recent_hits;
    hits_ = hits_ * keep + recent_hits;
    gain_ = gain_ * keep + gain;
    squared_gains_ = squared_gains_ * keep + gain * gain;
    is_trusted_ = is_trusted_ ? gain_ >= -kToleratedLoss * hits_
                              : gain_ > kSignificance * std::sqrt(squared_gains_);
}

}  // namespace aiokv
