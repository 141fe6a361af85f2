#include "aiokv/reuse_sketch.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace aiokv {
namespace {

constexpr std::uint64_t kCountersPerOffer = 16;
constexpr std::uint64_t kMinCounters = 1 << 12;
constexpr std::uint64_t kMaxCounters = 1 << 24;
constexpr std::uint8_t kOffer = 2;  // 1 after the first halving, 0 after the second
constexpr std::uint8_t kMost = 16;

std::uint64_t counters_for(std::uint64_t period) {
    return std::clamp(std::bit_ceil(period * kCountersPerOffer), kMinCounters, kMaxCounters);
}

}  // namespace

ReuseSketch::ReuseSketch(std::uint64_t period)
    : period_(std::clamp<std::uint64_t>(period, 1, kMaxCounters / kCountersPerOffer)),
      counters_(counters_for(period_)) {}

bool ReuseSketch::offer(const Digest& digest) {
    std::array<std::uint32_t, 4> hashes;
    std::memcpy(hashes.data(), digest.data(), sizeof(hashes));
    bool known = true;
    for (const std::uint32_t hash : hashes) {
        std::uint8_t& counter = counters_[hash & (counters_.size() - 1)];
        known = known && counter > 0;
    }
    for (const std::uint32_t hash : hashes) {
        std::uint8_t& counter = counters_[hash & (counters_.size() - 1)];
        counter = std::min<std::uint8_t>(static_cast<std::uint8_t>(counter + kOffer), kMost);
    }
    if (++offers_ == period_) age();
    return known;
}

void ReuseSketch::age() {
    offers_ = 0;
    for (std::uint8_t& counter : counters_) counter = static_cast<std::uint8_t>(counter / 2);
}

}  // namespace aiokv
