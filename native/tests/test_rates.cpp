// Rates that ReturnRates learns from counts: order and signs, not digits.
#include <algorithm>
#include <vector>

#include "aiokv/return_rates.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

constexpr std::uint64_t kAge = 4;

template <typename Visit>
void for_each_class(Visit visit) {
    for (std::uint32_t uses = 0; uses < ReuseFeatures::kUses; ++uses)
        for (std::uint32_t added = 0; added < ReuseFeatures::kAdded; ++added)
            for (std::uint32_t gap = 0; gap < ReuseFeatures::kGaps; ++gap)
                visit(ReuseFeatures{uses, added, gap});
}

// Stretches for which `comes` holds return four times as often as others.
template <typename Comes>
void expect_learned(Comes comes) {
    ReturnRates rates(1024);
    for_each_class([&](const ReuseFeatures& features) {
        rates.count_waiting(features, kAge, 1000);
        const int returns = comes(features) ? 200 : 50;
        for (int i = 0; i < returns; ++i) rates.count_return(features, kAge);
    });
    rates.learn(1);
    double least = 1e9;  // of stretches that return
    double most = 0;     // of stretches that do not
    double fewest = 1e9;
    for_each_class([&](const ReuseFeatures& features) {
        const double score = rates.score(features.reuse_class(), kAge);
        if (comes(features)) {
            least = std::min(least, score);
        } else {
            most = std::max(most, score);
            fewest = std::min(fewest, score);
        }
    });
    CHECK(least > 2 * most);
    CHECK(least < 8 * most);
    CHECK_EQ(fewest, most);
}

}  // namespace

TEST(each_value_of_each_feature_has_its_own_factor) {
    for (std::uint32_t value = 0; value < ReuseFeatures::kUses; ++value)
        expect_learned([value](const ReuseFeatures& f) { return f.uses == value; });
    for (std::uint32_t value = 0; value < ReuseFeatures::kAdded; ++value)
        expect_learned([value](const ReuseFeatures& f) { return f.added == value; });
    for (std::uint32_t value = 0; value < ReuseFeatures::kGaps; ++value)
        expect_learned([value](const ReuseFeatures& f) { return f.gap == value; });
}

TEST(an_age_at_which_stretches_return_scores_highest_just_before_it) {
    ReturnRates rates(1024);
    const ReuseFeatures features{};
    for (std::uint64_t age = 1; age <= 512; age *= 2) rates.count_waiting(features, age, 1000);
    for (int i = 0; i < 500; ++i) rates.count_return(features, 64);
    rates.learn(1);
    const auto score = [&](std::uint64_t age) { return rates.score(features.reuse_class(), age); };
    CHECK(score(64) > score(32));
    CHECK(score(32) > score(8));
    CHECK(score(64) > 2 * score(128));
    CHECK(score(64) > 2 * score(512));
}

TEST(two_ages_per_octave_have_separate_rates) {
    const std::vector<std::uint64_t> ages{1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192};
    for (std::size_t i = 0; i + 1 < ages.size(); ++i) {
        ReturnRates rates(1024);
        const ReuseFeatures features{};
        for (const std::uint64_t age : ages) rates.count_waiting(features, age, 1000);
        for (int n = 0; n < 500; ++n) rates.count_return(features, ages[i]);
        rates.learn(1);
        CHECK(rates.score(0, ages[i]) > 2 * rates.score(0, ages[i + 1]));
        CHECK_EQ(rates.score(0, ages[i]), rates.score(0, ages[i + 1] - 1));
    }
}

TEST(old_counts_decay) {
    ReturnRates rates(1024);
    const ReuseFeatures early{0, 0, 0}, late{1, 0, 0};
    const auto count = [&](const ReuseFeatures& comes, const ReuseFeatures& stays_away) {
        for (const ReuseFeatures& each : {comes, stays_away}) rates.count_waiting(each, kAge, 1000);
        for (int i = 0; i < 200; ++i) rates.count_return(comes, kAge);
    };
    const auto score = [&](const ReuseFeatures& f) { return rates.score(f.reuse_class(), kAge); };
    count(early, late);
    rates.learn(1);
    CHECK(score(early) > score(late));
    count(late, early);
    rates.learn(0.1);
    count(late, early);
    rates.learn(0.1);
    count(late, early);
    rates.learn(1);
    CHECK(score(late) > score(early));
    rates.learn(0);
    CHECK_EQ(score(late), 0.0);
}

TEST(each_label_has_its_own_factor_per_age) {
    constexpr std::uint32_t kSoon = 1, kLate = 2, kNever = 3;
    constexpr std::uint64_t kYoung = 4, kOld = 256;
    ReturnRates rates(1024);
    rates.admit(kNever);
    const auto of = [](std::uint32_t label) {
        ReuseFeatures features;
        features.label = label;
        return features;
    };
    for (const std::uint32_t label : {kSoon, kLate, kNever}) {
        rates.count_waiting(of(label), kYoung, 10'000);
        rates.count_waiting(of(label), kOld, 100'000);
    }
    for (int i = 0; i < 1000; ++i) {
        rates.count_return(of(kSoon), kYoung);
        rates.count_return(of(kLate), kOld);
    }
    for (int i = 0; i < 4; ++i) rates.learn(1);
    const auto score = [&](std::uint32_t label, std::uint64_t age) {
        return rates.score(of(label).reuse_class(), age);
    };
    CHECK(score(kSoon, kYoung) > 4 * score(kLate, kYoung));
    CHECK(score(kLate, kOld) > 1.5 * score(kSoon, kOld));  // soon, too, may return later
    CHECK(score(kSoon, kYoung) > 20 * score(kNever, kYoung));
    CHECK(score(kLate, kOld) > 20 * score(kNever, kOld));
}

TEST(a_label_without_counts_scores_like_requests_without_labels) {
    ReturnRates rates(1024);
    for_each_class([&](const ReuseFeatures& features) {
        rates.count_waiting(features, kAge, 1000);
        for (int i = 0; i < 50; ++i) rates.count_return(features, kAge);
    });
    rates.learn(1);
    rates.admit(7);
    for_each_class([&](ReuseFeatures features) {
        const double without = rates.score(features.reuse_class(), kAge);
        features.label = 7;
        CHECK_EQ(rates.score(features.reuse_class(), kAge), without);
    });
}
