#include "aiokv/return_rates.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <span>

namespace aiokv {
namespace {

constexpr double kBasePrior = 1;     // weight, in returns, of the mean of all ages
constexpr double kFactorPrior = 20;  // weight, in returns, of the factor 1
constexpr double kAgePrior = 20;     // weight, in returns, of a label's factor over all ages
// Factors and rates are fitted in turn, once each time they are learnt. The labels, which come into
// use at any time, need more. Chosen with tests/harness/trace_families.py, seeds below 200.
constexpr int kFitsWithLabels = 3;
constexpr double kLevelsPerOctave = 3;
constexpr double kLevelOfOne = 8;

// A class is the sum of value * stride; see ReuseFeatures::reuse_class().
struct Axis {
    std::uint32_t size;
    std::uint32_t stride;
    std::uint32_t value(std::uint32_t reuse_class) const { return reuse_class / stride % size; }
};
constexpr std::array<Axis, 3> kAxes{
    {{ReuseFeatures::kUses, ReuseFeatures::kAdded * ReuseFeatures::kGaps},
     {ReuseFeatures::kAdded, ReuseFeatures::kGaps},
     {ReuseFeatures::kGaps, 1}}};

double bucket_start(std::uint32_t bucket) {
    if (bucket == 0) return 0;
    const std::uint32_t octave = (bucket + 1) / 2;
    const std::uint32_t half = (bucket + 1) % 2;
    return static_cast<double>((2u + half) << (octave - 1));
}

}  // namespace

double ReturnRates::bucket_width(std::uint32_t bucket) const {
    return (bucket + 1 < kBuckets ? bucket_start(bucket + 1) : window_) - bucket_start(bucket);
}

double ReturnRates::factor(std::uint32_t reuse_class) const {
    double product = 1;
    for (std::size_t i = 0; i < kAxes.size(); ++i)
        product *= factors_[i][kAxes[i].value(reuse_class)];
    return product;
}

ReturnRates::Classes ReturnRates::factors() const {
    Classes products{};
    for (std::uint32_t c = 0; c < ReuseFeatures::kCombinations; ++c) products[c] = factor(c);
    return products;
}

ReturnRates::ReturnRates(double window) : window_(window) {
    for (std::uint32_t level = 0; level < kLevels; ++level) {
        relative_of_level_[level] = std::exp2((level - kLevelOfOne) / kLevelsPerOctave);
    }
    admit(0);
    learn(1);
}

void ReturnRates::admit(std::uint32_t label) {
    while (labels_.size() <= label) {
        labels_.emplace_back().factors.fill(1);
        rank(labels_.back());
    }
}

void ReturnRates::learn(double keep) {
    fade(keep);
    const bool has_labels = labels_.size() > 1;
    for (int i = 0; i < (has_labels ? kFitsWithLabels : 1); ++i) {
        fit_base();
        fit_factors();
        if (has_labels) fit_labels();
        center_factors();
    }
    for (std::uint32_t c = 0; c < ReuseFeatures::kCombinations; ++c) {
        const double level = std::round(std::log2(factor(c)) * kLevelsPerOctave) + kLevelOfOne;
        levels_[c] = static_cast<std::uint8_t>(std::clamp(level, 0.0, kLevels - 1.0));
    }
    const auto combinations = std::span(levels_).first(ReuseFeatures::kCombinations);
    used_levels_.assign(combinations.begin(), combinations.end());
    std::ranges::sort(used_levels_);
    const auto rest = std::ranges::unique(used_levels_);
    used_levels_.erase(rest.begin(), rest.end());
    for (Label& label : labels_) rank(label);
}

void ReturnRates::fade(double keep) {
    for (Label& label : labels_) {
        for_each_counted(label, [&](std::uint32_t c) {
            for (double& returns : label.returns[c]) returns *= keep;
            for (double& waiting : label.waiting[c]) waiting *= keep;
        });
    }
}

// Computes the rate of each age: the returns at that age, divided by the waiting stretches weighted
// with their factors.
void ReturnRates::fit_base() {
    Ages returned{};
    Ages waited{};
    double all_returned = 0;
    double all_waited = 0;
    const Classes relative = factors();
    for (const Label& label : labels_) {
        for_each_counted(label, [&](std::uint32_t c) {
            for (std::uint32_t b = 0; b < kBuckets; ++b) {
                returned[b] += label.returns[c][b];
                waited[b] += label.waiting[c][b] * relative[c] * label.factors[b];
                all_returned += label.returns[c][b];
                all_waited += label.waiting[c][b];
            }
        });
    }
    base_.fill(0);
    if (all_returned <= 0 || all_waited <= 0) return;
    const double prior_waited = kBasePrior * 2 * all_waited / all_returned;
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
        base_[b] = (returned[b] + kBasePrior) / (waited[b] + prior_waited);
    }
}

// Computes each factor in turn, given the others: the returns, divided by the returns expected
// without that factor.
void ReturnRates::fit_factors() {
    Classes returned{};
    Classes expected{};  // expected returns if all factors but that of the label were 1
    for (const Label& label : labels_) {
        for_each_counted(label, [&](std::uint32_t c) {
            for (std::uint32_t b = 0; b < kBuckets; ++b) {
                returned[c] += label.returns[c][b];
                expected[c] += label.waiting[c][b] * base_[b] * label.factors[b];
            }
        });
    }
    for (std::size_t i = 0; i < kAxes.size(); ++i) {
        std::array<double, 8> came{};
        std::array<double, 8> due{};
        for (std::uint32_t c = 0; c < ReuseFeatures::kCombinations; ++c) {
            const std::uint32_t value = kAxes[i].value(c);
            came[value] += returned[c];
            due[value] += expected[c] * factor(c) / factors_[i][value];
        }
        for (std::uint32_t value = 0; value < kAxes[i].size; ++value) {
            factors_[i][value] = (came[value] + kFactorPrior) / (due[value] + kFactorPrior);
        }
    }
}

// Computes the factors of the labels, for each age, given all others.
void ReturnRates::fit_labels() {
    const Classes relative = factors();
    for (Label& label : labels_) {
        Ages came{};
        Ages due{};
        for_each_counted(label, [&](std::uint32_t c) {
            for (std::uint32_t b = 0; b < kBuckets; ++b) {
                came[b] += label.returns[c][b];
                due[b] += label.waiting[c][b] * relative[c] * base_[b];
            }
        });
        const double all_came = std::accumulate(came.begin(), came.end(), kFactorPrior);
        const double all_due = std::accumulate(due.begin(), due.end(), kFactorPrior);
        const double at_any_age = all_came / all_due;
        for (std::uint32_t b = 0; b < kBuckets; ++b) {
            label.factors[b] = (came[b] + kAgePrior * at_any_age) / (due[b] + kAgePrior);
        }
    }
}

// Factors and base are determined only up to a constant. Sets the mean factor of waiting stretches
// to 1.
void ReturnRates::center_factors() {
    double waited = 0;
    double weighted = 0;
    const Classes relative = factors();
    for (const Label& label : labels_) {
        for_each_counted(label, [&](std::uint32_t c) {
            for (const double waiting : label.waiting[c]) {
                waited += waiting;
                weighted += waiting * relative[c];
            }
        });
    }
    if (waited <= 0) return;
    const double mean = weighted / waited;
    for (double& value : factors_[0]) value /= mean;
    for (double& rate : base_) rate *= mean;
}

// Computes, for each level in use and age, the best ratio of hits to time over all waiting times.
// The inner loops are over the levels, so that the compiler can vectorize them.
void ReturnRates::rank(Label& label) {
    using Levels = std::array<double, kLevels>;
    const std::size_t used = used_levels_.size();
    std::array<Levels, kBuckets> stay;  // share of those at the start of the bucket that are still
                                        // waiting at its end
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
        for (std::size_t l = 0; l < used; ++l) {
            const double r =
                base_[b] * label.factors[b] * relative_of_level_[used_levels_[l]] * bucket_width(b);
            stay[b][l] = 1 / (1 + r + r * r / 2);
        }
    }
    for (std::uint32_t from = 0; from < kBuckets; ++from) {
        Levels waiting;
        waiting.fill(1);
        Levels came{};
        Levels time{};
        Levels best{};
        for (std::uint32_t b = from; b < kBuckets; ++b) {
            const double width = bucket_width(b);
            for (std::size_t l = 0; l < used; ++l) {
                const double left = waiting[l] * stay[b][l];
                came[l] += waiting[l] - left;
                time[l] += width * (waiting[l] + left) / 2;
                waiting[l] = left;
                const double rate = came[l] / time[l];
                best[l] = best[l] < rate ? rate : best[l];
            }
        }
        for (std::size_t l = 0; l < used; ++l) label.scores[used_levels_[l]][from] = best[l];
    }
}

}  // namespace aiokv
