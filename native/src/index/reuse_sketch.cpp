#include "aiokv/reuse_sketch.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

constexpr std::uint64_t kCountersPerOffer = 16;
constexpr std::uint64_t kMinCounters = 1 << 12;
constexpr std::uint64_t kMaxCounters = 1 << 24;
constexpr std::uint8_t kOffer = 2;  // becomes 1 at the first halving, 0 at the second
constexpr std::uint32_t kMostOffers = 127;

std::uint64_t counters_for(std::uint64_t period) {
    return std::clamp(std::bit_ceil(period * kCountersPerOffer), kMinCounters, kMaxCounters);
}

}  // namespace

ReuseSketch::ReuseSketch(std::uint64_t period, std::uint32_t most)
    : period_(std::clamp<std::uint64_t>(period, 1, kMaxCounters / kCountersPerOffer)),
      most_(static_cast<std::uint8_t>(kOffer * std::min(most, kMostOffers))),
      counters_(counters_for(period_)) {}

std::uint32_t ReuseSketch::count(const Digest& digest) {
    std::array<std::uint32_t, 4> hashes;
    std::memcpy(hashes.data(), digest.data(), sizeof(hashes));
    std::uint32_t least = most_;
    for (const std::uint32_t hash : hashes) {
        least = std::min<std::uint32_t>(least, counters_[hash & (counters_.size() - 1)]);
    }
    for (const std::uint32_t hash : hashes) {
        std::uint8_t& counter = counters_[hash & (counters_.size() - 1)];
        counter = static_cast<std::uint8_t>(std::min<std::uint32_t>(counter + kOffer, most_));
    }
    if (++offers_ == period_) age();
    return (least + kOffer - 1) / kOffer;
}

void ReuseSketch::restore(std::span<const std::uint8_t> counters) {
    if (counters.size() != counters_.size()) {
        throw UsageError("restore: " + std::to_string(counters.size()) + " counters for " +
                         std::to_string(counters_.size()));
    }
    std::copy(counters.begin(), counters.end(), counters_.begin());
}

void ReuseSketch::age() {
    offers_ = 0;
    for (std::uint8_t& counter : counters_) counter = static_cast<std::uint8_t>(counter / 2);
}

}  // namespace aiokv
