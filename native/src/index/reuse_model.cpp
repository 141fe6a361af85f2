#include "aiokv/reuse_model.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace aiokv {
namespace {

constexpr std::uint64_t kMinEpochBlocks = 1024;
constexpr std::uint64_t kMinLearnBlocks = 32768;
constexpr std::uint64_t kMinLearnStretches = 1024;  // with labels
constexpr std::uint64_t kSweepCapacities = 4;  // requested capacities per sweep of the whole list
constexpr std::uint32_t kSampledRoom =
    8192;  // largest tier, in stretches, that is listed without sampling
constexpr std::uint32_t kMaxSampleShift = 3;
constexpr double kFade = 0.008;  // share of learnt counts that fades per requested capacity
// Number of uses, on average, after which the count of uses moves up by one.
constexpr std::array<std::uint32_t, ReuseFeatures::kUses> kUsesPerStep{1, 1, 1, 1, 4, 8, 24, 0};
constexpr std::array<std::uint64_t, 3> kGapUnits{96, 256, 768};  // 1.5, 4, 12 capacities

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
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

std::uint32_t sample_shift_of(std::uint32_t room) {
    if (room < kSampledRoom) return 0;
    return std::min<std::uint32_t>(std::bit_width(room / kSampledRoom) + 1, kMaxSampleShift);
}

std::uint32_t added_of(std::size_t stretches) {
    return stretches <= 2 ? 0 : stretches <= 32 ? 1 : 2;
}

std::uint32_t gap_of(std::uint64_t age) {
    std::uint32_t gap = 1;
    for (const std::uint64_t units : kGapUnits) gap += age > units;
    return gap;
}

std::uint32_t used_again(std::uint32_t uses, std::uint32_t random) {
    if (uses + 1 == ReuseFeatures::kUses) return uses;
    return uses + (random % kUsesPerStep[uses] == 0);
}

}  // namespace

ReuseModel::ReuseModel(std::uint32_t block_tokens, std::uint32_t capacity_blocks)
    : block_tokens_(block_tokens),
      stretch_shift_(static_cast<std::uint32_t>(
          std::bit_width(std::max(1u, kStretchTokens / block_tokens)) - 1)),
      capacity_(capacity_blocks),
      unit_(std::max(1u, capacity_blocks / kUnitsPerCapacity)),
      epoch_blocks_(std::max<std::uint64_t>(kMinEpochBlocks, capacity_blocks / 16)),
      sample_shift_(sample_shift_of(capacity_blocks >> stretch_shift_)),
      sample_mask_(((std::uint64_t{1} << sample_shift_) - 1) << 16),
      ghosts_((GhostList::kWindowUnits * unit_) >> (stretch_shift_ + sample_shift_)),
      rates_(GhostList::kWindowUnits) {}

// A stretch has the fingerprint of its last block.
void ReuseModel::fingerprint(std::span<const std::int32_t> tokens, std::uint64_t seed) {
    const std::size_t stretch_tokens = std::size_t{block_tokens_} << stretch_shift_;
    keys_.clear();
    sample_.clear();
    std::uint64_t key = seed;
    for (std::size_t end = stretch_tokens; end <= tokens.size(); end += stretch_tokens) {
        keys_.push_back(key = hash_block(&tokens[end - block_tokens_], block_tokens_, key));
        if ((key & sample_mask_) != 0) continue;
        sample_.push_back(static_cast<std::uint32_t>(keys_.size() - 1));
        ghosts_.prefetch(key);
    }
}

// Adds the rest behind the last full stretch, because it takes room in a tier. Call last: the ghost
// list has full stretches only.
void ReuseModel::fingerprint_rest(std::span<const std::int32_t> tokens, std::uint64_t seed) {
    const std::size_t stretch_tokens = std::size_t{block_tokens_} << stretch_shift_;
    const std::size_t rest = tokens.size() - keys_.size() * stretch_tokens;
    const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(rest, block_tokens_));
    const std::uint64_t before = keys_.empty() ? seed : keys_.back();
    const std::uint64_t key = hash_block(tokens.data() + tokens.size() - count, count, before);
    if ((key >> 32) * stretch_tokens >> 32 < rest) keys_.push_back(key);
}

// Sets known_ to the list's entries of the leading sampled stretches. A single missing entry, which
// was replaced, becomes nullptr; two end the known part.
void ReuseModel::find_known() {
    known_.clear();
    for (std::size_t i = 0; i < sample_.size(); ++i) {
        GhostList::Entry* entry = ghosts_.find(keys_[sample_[i]], now_);
        if (entry == nullptr &&
            (i + 1 == sample_.size() || ghosts_.find(keys_[sample_[i + 1]], now_) == nullptr)) {
            break;
        }
        known_.push_back(entry);
    }
}

// Returns the features of the stretches that the prompt adds. If a conversation continues, they get
// its uses and gap. If prompts have diverged behind the known prefix before, that prefix says
// nothing about what follows it.
ReuseFeatures ReuseModel::first_use_of_rest() {
    const std::size_t added = (sample_.size() - known_.size()) << sample_shift_;
    ReuseFeatures features{0, added_of(added), 0};
    if (known_.empty() || added == 0) return features;
    GhostList::Entry& last = *known_.back();
    if (last.forked == 0) {
        features.uses = last.uses;
        features.gap = gap_of(GhostList::age(last, now_));
    }
    last.forked = 1;
    return features;
}

void ReuseModel::observe(std::span<const std::int32_t> tokens, std::uint64_t seed,
                         std::vector<ReuseClass>& classes) {
    close_epoch();  // before the prompt, whose stretches begin to wait after it
    fingerprint(tokens, seed);
    find_known();
    const std::uint64_t asked_at = now_;
    const ReuseFeatures rest = first_use_of_rest();
    const auto random = static_cast<std::uint32_t>(mix(clock_, seed) >> 32);
    clock_ += (tokens.size() + block_tokens_ - 1) / block_tokens_;
    now_ = clock_ / unit_;  // stretches wait from the end of their prompt
    ReuseFeatures features = rest;
    classes.clear();
    classes.reserve(keys_.size() + 1);
    for (std::size_t i = 0; i < sample_.size(); ++i) {
        const bool is_known = i < known_.size() && known_[i] != nullptr;
        if (is_known) {
            const ReuseFeatures before = features_of(*known_[i]);
            const std::uint64_t age = GhostList::age(*known_[i], asked_at);
            rates_.count_return(before, age);
            if (labelled_rates_) {
                labelled_rates_->count_return(with_label(before, *known_[i]), age);
            }
            features = {used_again(before.uses, random), rest.added, gap_of(age)};
        } else if (i >= known_.size()) {
            features = rest;
        }
        GhostList::Entry& entry = is_known ? *known_[i] : ghosts_.replace(keys_[sample_[i]], now_);
        entry.uses = features.uses & 7;
        entry.added = (features.added + 1) & 3;
        entry.gap = features.gap & 7;
        ghosts_.set_label(entry, 0);
        entry.time = now_ & 0xfff;
        classes.resize(sample_[i] + 1, features.reuse_class());  // also for the stretches before it
    }
    classes.resize(keys_.size(), features.reuse_class());
    // Tokens behind the last full stretch count as used once, because the next turn may write them
    // differently.
    classes.push_back(ReuseFeatures{0, rest.added, 0}.reuse_class());
    fingerprint_rest(tokens, seed);
}

void ReuseModel::label(std::span<const std::int32_t> tokens, std::uint64_t seed,
                       std::uint32_t label, std::span<ReuseClass> classes) {
    if (!labelled_rates_) labelled_rates_ = rates_;
    labelled_rates_->admit(label);
    fingerprint(tokens, seed);
    for (const std::uint32_t i : sample_) {
        if (const auto* entry = ghosts_.find(keys_[i], now_)) ghosts_.set_label(*entry, label);
    }
    for (ReuseClass& c : classes) c = ReuseFeatures::with_label(c, label);
    fingerprint_rest(tokens, seed);
}

void ReuseModel::close_epoch() {
    if (clock_ - last_epoch_ < epoch_blocks_) return;
    sweep(clock_ - last_epoch_);
    last_epoch_ = clock_;
    learn(rates_, last_learnt_, kMinLearnBlocks);
    if (labelled_rates_) {
        learn(*labelled_rates_, labels_learnt_,
              std::uint64_t{kMinLearnStretches} << stretch_shift_);
    }
    ++epoch_;
}

// Learns if at least so many blocks were requested since the last time.
void ReuseModel::learn(ReturnRates& rates, std::uint64_t& learnt, std::uint64_t least_blocks) {
    if (clock_ - learnt < std::max(least_blocks, 2 * epoch_blocks_)) return;
    const double capacities = static_cast<double>(clock_ - learnt) / static_cast<double>(capacity_);
    rates.learn(1 / (1 + kFade * capacities));
    learnt = clock_;
}

// Counts the waiting stretches in a part of the list that represents all of it. The whole list is
// counted once per four capacities.
void ReuseModel::sweep(std::uint64_t blocks) {
    const std::size_t size = ghosts_.size();
    const auto part = static_cast<std::size_t>(
        std::min<std::uint64_t>(size, size * blocks / (kSweepCapacities * capacity_) + 1));
    const double units = static_cast<double>(blocks) / static_cast<double>(unit_);
    const double weight = units * static_cast<double>(size) / static_cast<double>(part);
    ghosts_.sweep(part, now_, [&](const GhostList::Entry& entry, std::uint64_t age) {
        rates_.count_waiting(features_of(entry), age, weight);
        if (!labelled_rates_) return;
        labelled_rates_->count_waiting(with_label(features_of(entry), entry), age, weight);
    });
}

}  // namespace aiokv
