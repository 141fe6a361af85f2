// How often do prefixes return? Rates are learned from counts of stretches that waited and of those
// that returned.
//
// Proportional hazards: the rate of a stretch is the rate of its age, common to all stretches,
// times one factor per feature. Three features have 16 factors to learn; a table of their 120
// combinations would take ten times as long. Factors are multiplied and rounded to a level. The
// score of (level, age) is the best rate of hits per block and time that keeping such a block
// longer can bring: Gittins' index.
//
// A label, which a client gave the request when it ended, has a factor per age, because one label
// may announce a return in seconds and another one a return in minutes. Where an age has few
// counts, its factor is that of the label over all ages.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <bitset>
#include <cstdint>
#include <vector>

namespace aiokv {

using ReuseClass = std::uint16_t;

// Features of a stretch at its last use. Each combination is a class.
struct ReuseFeatures {
    static constexpr std::uint32_t kUses = 8;   // requests: 1, 2, 3, 4, 5-8, 9-16, 17-40, more
    static constexpr std::uint32_t kAdded = 3;  // new stretches in the prompt: 0-2, 3-32, more
    static constexpr std::uint32_t kGaps = 5;   // no earlier use, or time since it; see gap_of()
    static constexpr std::uint32_t kCombinations = kUses * kAdded * kGaps;
    static constexpr std::uint32_t kUnlabelled = std::bit_ceil(kCombinations);  // classes per label
    static constexpr std::uint32_t kLabels =
        16;  // none, 14 labels, and all others; see ReuseLabels
    static constexpr std::uint32_t kClasses = kUnlabelled * kLabels;

    std::uint32_t uses = 0;
    std::uint32_t added = 0;
    std::uint32_t gap = 0;
    std::uint32_t label = 0;

    ReuseClass reuse_class() const {
        return with_label(static_cast<ReuseClass>((uses * kAdded + added) * kGaps + gap), label);
    }
    // Returns the class with another label.
    static ReuseClass with_label(ReuseClass reuse_class, std::uint32_t label) {
        return static_cast<ReuseClass>(reuse_class % kUnlabelled + label * kUnlabelled);
    }
};

class ReturnRates {
  public:
    // `window`: largest age, in units.
    explicit ReturnRates(double window);

    // Makes room for a label. Call before it is counted or scored.
    void admit(std::uint32_t label);
    void count_return(const ReuseFeatures& features, std::uint64_t age) {
        const ReuseClass c = features.reuse_class();
        Label& label = labels_[label_of(c)];
        label.returns[unlabelled(c)][bucket_of(age)] += 1;
        label.counted.set(unlabelled(c));
    }
    void count_waiting(const ReuseFeatures& features, std::uint64_t age, double units) {
        const ReuseClass c = features.reuse_class();
        Label& label = labels_[label_of(c)];
        label.waiting[unlabelled(c)][bucket_of(age)] += units;
        label.counted.set(unlabelled(c));
    }
    // Computes new factors and scores. Then reduces the counts to a share of `keep`.
    void learn(double keep);

    // Returns the score: blocks with a higher score are kept longer.
    double score(ReuseClass reuse_class, std::uint64_t age) const {
        return score_in(reuse_class, bucket_of(age));
    }
    double score_in(ReuseClass reuse_class, std::uint32_t bucket) const {
        return scores(reuse_class)[bucket];
    }
    std::size_t bytes() const { return labels_.capacity() * sizeof(Label); }

    static constexpr std::uint32_t kBuckets = 21;  // two per octave of age
    using Ages = std::array<double, kBuckets>;
    // Returns the scores of a class by bucket of age.
    const Ages& scores(ReuseClass reuse_class) const {
        return labels_[label_of(reuse_class)].scores[levels_[unlabelled(reuse_class)]];
    }
    static std::uint32_t bucket_of(std::uint64_t age) {
        if (age < 2) return 0;
        const auto octave = static_cast<std::uint32_t>(std::bit_width(age)) - 1;
        const auto half = static_cast<std::uint32_t>(age >> (octave - 1)) & 1;
        return std::min(2 * octave - 1 + half, kBuckets - 1);
    }

  private:
    static constexpr std::uint32_t kLevels = 32;  // three per octave of factors
    using Classes = std::array<double, ReuseFeatures::kUnlabelled>;
    struct Label {
        std::array<Ages, ReuseFeatures::kUnlabelled> returns{};  // returned stretches, by age
        std::array<Ages, ReuseFeatures::kUnlabelled> waiting{};  // units of waiting, by age
        std::bitset<ReuseFeatures::kUnlabelled> counted;         // classes with counts
        Ages factors{};
        std::array<Ages, kLevels> scores{};  // of the levels in use
    };

    static std::uint32_t label_of(ReuseClass c) { return c / ReuseFeatures::kUnlabelled; }
    static std::uint32_t unlabelled(ReuseClass c) { return c % ReuseFeatures::kUnlabelled; }
    double bucket_width(std::uint32_t bucket) const;
    double factor(std::uint32_t reuse_class) const;
    Classes factors() const;
    // Calls `visit` with each class that a label has counts of.
    template <class Visit>
    static void for_each_counted(const Label& label, Visit visit) {
        for (std::uint32_t c = 0; c < ReuseFeatures::kCombinations; ++c) {
            if (label.counted[c]) visit(c);
        }
    }
    void fade(double keep);
    void fit_base();
    void fit_factors();
    void fit_labels();
    void center_factors();
    void rank(Label& label);

    double window_;
    std::vector<Label> labels_;  // 0: no label
    Ages base_{};                // returns per stretch and unit
    std::array<std::array<double, 8>, 3> factors_ = {
        {{1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1, 1}}};
    std::array<double, kLevels> relative_of_level_{};
    std::array<std::uint8_t, ReuseFeatures::kUnlabelled> levels_{};
    std::vector<std::uint8_t> used_levels_;  // the different ones in levels_
};

}  // namespace aiokv
