#include "aiokv/reuse_model.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace aiokv {
namespace {

constexpr std::uint64_t kMix = 0x9e3779b97f4a7c15;
constexpr std::uint32_t kMaxCount = 63;
constexpr double kFade = 0.0005;    // of what was learnt, a sixteenth of the capacity
constexpr double kPriorHits = 1.0;  // weight of the whole against a class, of a class against
                                    // one age of it

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * kMix;
    return hash ^ (hash >> 29);
}

std::uint64_t hash_block(const std::int32_t* tokens, std::uint32_t count, std::uint64_t hash) {
    std::uint32_t i = 0;
    for (; i + 2 <= count; i += 2) {
        std::uint64_t word = 0;
        std::memcpy(&word, tokens + i, sizeof(word));
        hash = mix(hash, word);
    }
    if (i < count) hash = mix(hash, static_cast<std::uint32_t>(tokens[i]));
    return hash ^ (hash >> 32);
}

// A rate learnt from `hits` in `exposure`, drawn towards `prior`.
double rate(double hits, double exposure, double prior) {
    if (prior <= 0) return exposure > 0 ? hits / exposure : 0.0;
    return (hits + kPriorHits) / (exposure + kPriorHits / prior);
}

}  // namespace

ReuseModel::ReuseModel(std::uint32_t block_tokens, std::uint32_t capacity_blocks)
    : block_tokens_(block_tokens),
      stretch_shift_(static_cast<std::uint32_t>(
          std::bit_width(std::max(1u, kStretchTokens / block_tokens)) - 1)),
      stretch_blocks_(1u << stretch_shift_),
      capacity_(capacity_blocks),
      unit_(std::max(1u, capacity_blocks / kUnitsPerCapacity)),
      epoch_ticks_(std::max<std::uint64_t>(kMinEpochTicks, capacity_blocks / 16)) {
    const std::uint64_t window_blocks = kWindowUnits * unit_;
    sets_ = std::max<std::size_t>(128, window_blocks / stretch_blocks_ / kWays);
    table_.resize(sets_ * kWays);
}

// -- ages and classes ------------------------------------------------------------------------

std::uint32_t ReuseModel::age_bucket(std::uint64_t age) {
    if (age < 2) return 0;
    const auto octave = static_cast<std::uint32_t>(std::bit_width(age)) - 1;
    const auto half = static_cast<std::uint32_t>(age >> (octave - 1)) & 1;
    return std::min(2 * octave - 1 + half, kBuckets - 1);
}

double ReuseModel::bucket_start(std::uint32_t bucket) {
    if (bucket == 0) return 0;
    const std::uint32_t octave = (bucket + 1) / 2;
    const std::uint32_t half = (bucket + 1) % 2;
    return static_cast<double>((2u + half) << (octave - 1));
}

ReuseClass ReuseModel::class_of(const Entry& entry) {
    const std::uint32_t count = entry.count;
    const std::uint32_t uses = count <= 4    ? count - 1
                               : count <= 8  ? 4
                               : count <= 16 ? 5
                               : count <= 40 ? 6
                                             : 7;
    return static_cast<ReuseClass>(uses * 3 + entry.added);
}

std::uint32_t ReuseModel::age_of(const Entry& entry) const {
    return (static_cast<std::uint32_t>(now()) - entry.time) % (2 * kWindowUnits);
}

// -- the table -------------------------------------------------------------------------------

std::size_t ReuseModel::set_of(std::uint64_t key) const {
    return ((key >> 32) * sets_ >> 32) * kWays;
}

ReuseModel::Entry* ReuseModel::find(std::uint64_t key) {
    Entry* set = &table_[set_of(key)];
    for (std::uint32_t i = 0; i < kWays; ++i) {
        if (set[i].tag == (key & 0x7ff) && set[i].count > 0) {
            return age_of(set[i]) < kWindowUnits ? &set[i] : nullptr;
        }
    }
    return nullptr;
}

// An entry of the same name if there is one, else an empty one, else the oldest.
ReuseModel::Entry& ReuseModel::replace(std::uint64_t key) {
    Entry* set = &table_[set_of(key)];
    Entry* oldest = set;
    std::uint32_t oldest_age = 0;
    for (std::uint32_t i = 0; i < kWays; ++i) {
        const bool same = set[i].tag == (key & 0x7ff) && set[i].count > 0;
        const std::uint32_t age = set[i].count == 0 ? 2 * kWindowUnits : age_of(set[i]);
        if (same || age > oldest_age) {
            oldest = &set[i];
            oldest_age = age;
        }
        if (same) break;
    }
    *oldest = Entry{};
    oldest->tag = key & 0x7ff;
    return *oldest;
}

// known_: the entries of the leading stretches that the table knows; a lone gap, whose entry was
// replaced, is bridged (nullptr).
std::size_t ReuseModel::find_known(std::span<const std::uint64_t> keys) {
    known_.clear();
    for (std::size_t i = 0; i < keys.size(); ++i) {
        Entry* entry = find(keys[i]);
        if (entry == nullptr && (i + 1 == keys.size() || find(keys[i + 1]) == nullptr)) break;
        known_.push_back(entry);
    }
    return known_.size();
}

void ReuseModel::observe(std::span<const std::int32_t> tokens, std::uint64_t seed,
                         std::vector<ReuseClass>& classes) {
    const std::size_t stretch_tokens = std::size_t{stretch_blocks_} * block_tokens_;
    const std::size_t stretches = tokens.size() / stretch_tokens;
    keys_.clear();
    std::uint64_t key = seed;
    for (std::size_t i = 1; i <= stretches; ++i) {  // the last block of a stretch stands for it
        const std::int32_t* block = &tokens[i * stretch_tokens - block_tokens_];
        keys_.push_back(key = hash_block(block, block_tokens_, key));
    }
    const std::size_t known = find_known(keys_);
    const std::size_t added = stretches - known;
    const std::uint32_t added_class = added <= 2 ? 0 : added <= 32 ? 1 : 2;

    // A conversation that goes on inherits its count; a shared prefix, where prompts part again
    // and again, says nothing about what follows it.
    std::uint32_t inherited = 1;
    if (known > 0 && added > 0) {
        Entry& last = *known_[known - 1];
        if (last.forked == 0) inherited = last.count;
        last.forked = 1;
    }
    classes.clear();
    std::uint32_t last_count = 1;
    for (std::size_t i = 0; i < stretches; ++i) {
        const bool is_known = i < known && known_[i] != nullptr;
        Entry& entry = is_known ? *known_[i] : replace(keys_[i]);
        if (is_known) {
            hits_[class_of(entry)][age_bucket(age_of(entry))] += 1;
            entry.count = std::min<std::uint32_t>(entry.count + 1u, kMaxCount);
        } else {
            entry.count = i < known && i > 0 ? last_count : inherited;
        }
        last_count = entry.count;
        entry.added = added_class;
        entry.time = static_cast<std::uint32_t>(now()) % (2 * kWindowUnits);
        classes.push_back(class_of(entry));
    }
    // What follows the last full stretch was seen once: the next turn may write it differently.
    classes.push_back(static_cast<ReuseClass>(added_class));
    advance((tokens.size() + block_tokens_ - 1) / block_tokens_);
}

// -- learning --------------------------------------------------------------------------------

void ReuseModel::advance(std::uint64_t ticks) {
    clock_ += ticks;
    now_ = clock_ / unit_;
    if (clock_ - last_epoch_ < epoch_ticks_) return;
    sweep(clock_ - last_epoch_);
    last_epoch_ = clock_;
    if (clock_ - last_learnt_ >= std::max(kMinLearnTicks, epoch_ticks_)) learn();
    ++epoch_;
}

// Count who waits, in a part of the table that stands for all of it, and forget what is too old.
// The whole table is passed once a capacity, before a time field can wrap.
void ReuseModel::sweep(std::uint64_t ticks) {
    const std::size_t size = table_.size();
    const auto part = static_cast<std::size_t>(
        std::min<std::uint64_t>(size, size * ticks / std::max<std::uint64_t>(capacity_, 1) + 1));
    const double units = static_cast<double>(ticks) / static_cast<double>(unit_);
    const double weight = units * static_cast<double>(size) / static_cast<double>(part);
    for (std::size_t i = 0; i < part; ++i) {
        Entry& entry = table_[sweep_at_];
        if (++sweep_at_ == size) sweep_at_ = 0;
        if (entry.count == 0) continue;
        const std::uint32_t age = age_of(entry);
        if (age >= kWindowUnits) {
            entry = Entry{};
        } else {
            exposure_[class_of(entry)][age_bucket(age)] += weight;
        }
    }
    time_ += units;
}

void ReuseModel::learn() {
    const double sixteenths = 16.0 * static_cast<double>(clock_ - last_learnt_) /
                              static_cast<double>(std::max<std::uint64_t>(capacity_, 1));
    const double keep = 1.0 / (1.0 + kFade * sixteenths);
    last_learnt_ = clock_;
    Ages all_hits{};
    Ages all_exposure{};
    double hits = 0;
    double exposure = 0;
    for (std::uint32_t c = 0; c < kClasses; ++c) {
        for (std::uint32_t b = 0; b < kBuckets; ++b) {
            all_hits[b] += hits_[c][b] *= keep;
            all_exposure[b] += exposure_[c][b] *= keep;
            hits += hits_[c][b];
            exposure += exposure_[c][b];
        }
    }
    time_ *= keep;
    const double overall = exposure > 0 ? hits / exposure : 0.0;
    Ages base{};
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
        base[b] = rate(all_hits[b], all_exposure[b], overall / 2);
    }
    for (std::uint32_t c = 0; c < kClasses; ++c) learn_class(c, base);
}

// Rates of return by age, drawn towards those of all classes; then, for each age, the best ratio
// of hits to time over all times to keep waiting.
void ReuseModel::learn_class(std::uint32_t reuse_class, const Ages& base) {
    const Ages& class_hits = hits_[reuse_class];
    const Ages& class_exposure = exposure_[reuse_class];
    double hits = 0;
    double expected = 0;
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
        hits += class_hits[b];
        expected += class_exposure[b] * base[b];
    }
    const double relative = (hits + kPriorHits) / (expected + kPriorHits);
    Ages stay{};  // share of those at the start of the bucket that are still waiting at its end
    Ages width{};
    for (std::uint32_t b = 0; b < kBuckets; ++b) {
        width[b] = b + 1 < kBuckets ? bucket_start(b + 1) - bucket_start(b)
                                    : kWindowUnits - bucket_start(b);
        const double r = rate(class_hits[b], class_exposure[b], base[b] * relative) * width[b];
        stay[b] = 1.0 / (1.0 + r + r * r / 2);
    }
    for (std::uint32_t from = 0; from < kBuckets; ++from) {
        double waiting = 1;
        double came = 0;
        double time = 0;
        double best = 0;
        for (std::uint32_t b = from; b < kBuckets; ++b) {
            const double left = waiting * stay[b];
            came += waiting - left;
            time += width[b] * (waiting + left) / 2;
            waiting = left;
            best = std::max(best, came / time);
        }
        scores_[reuse_class][from] = best;
    }
}

// Both orders are judged by the same table: LRU keeps what is younger than some age, the scores
// what stays above some threshold; either may keep as many stretches as there is room for.
double ReuseModel::predicted_gain(std::uint32_t capacity_blocks) const {
    const double room = time_ * capacity_blocks / stretch_blocks_;
    if (room <= 0) return 0;
    double lru_room = 0;
    double lru_hits = 0;
    for (std::uint32_t b = 0; b < kBuckets && lru_room < room; ++b) {
        double exposure = 0;
        double hits = 0;
        for (std::uint32_t c = 0; c < kClasses; ++c) {
            exposure += exposure_[c][b];
            hits += hits_[c][b];
        }
        lru_hits += hits * (exposure > room - lru_room ? (room - lru_room) / exposure : 1.0);
        lru_room += exposure;
    }
    std::vector<double> thresholds(1, 0.0);
    for (const Ages& ages : scores_) thresholds.insert(thresholds.end(), ages.begin(), ages.end());
    std::sort(thresholds.begin(), thresholds.end());
    const auto kept = [&](double threshold) {
        std::pair<double, double> sums{0, 0};  // exposure, hits
        for (std::uint32_t c = 0; c < kClasses; ++c) {
            for (std::uint32_t b = 0; b < kBuckets && scores_[c][b] >= threshold; ++b) {
                sums.first += exposure_[c][b];
                sums.second += hits_[c][b];
            }
        }
        return sums;
    };
    const auto fits = std::partition_point(thresholds.begin(), thresholds.end(),
                                           [&](double t) { return kept(t).first > room; });
    std::pair<double, double> sums{0, 0};
    if (fits != thresholds.end()) sums = kept(*fits);
    if (fits != thresholds.begin()) {  // a part of those at the threshold below fits as well
        const auto more = kept(*(fits - 1));
        if (more.first > sums.first) {
            const double part = (room - sums.first) / (more.first - sums.first);
            sums.second += (more.second - sums.second) * part;
        }
    }
    if (lru_hits <= 0) return sums.second > 0 ? 1.0 : 0.0;
    return sums.second / lru_hits - 1;
}

}  // namespace aiokv
