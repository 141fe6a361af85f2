// Durations counted in buckets whose upper bounds are powers of two seconds.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace aiokv {

class Histogram {
  public:
    static constexpr int kFirstExponent = -20;  // the first bound: 2^-20 s, about 1 us
    static constexpr int kLastExponent = 12;    // the last bound: 4096 s
    // The last bucket has no bound.
    static constexpr std::size_t kBuckets = kLastExponent - kFirstExponent + 2;

    void add(std::uint64_t nanoseconds);

    // Each bucket counts the durations above the bound before it, up to its own.
    const std::array<std::uint64_t, kBuckets>& counts() const { return counts_; }
    std::uint64_t sum_nanoseconds() const { return sum_nanoseconds_; }

  private:
    std::array<std::uint64_t, kBuckets> counts_{};
    std::uint64_t sum_nanoseconds_ = 0;
};

}  // namespace aiokv
