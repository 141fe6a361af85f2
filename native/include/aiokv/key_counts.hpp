// A counting Bloom filter of the keys of one or more slot tables, in memory that other processes
// read: they learn without a message that a key is not stored.
//
// Each key that is counted is found, by any thread and process, as soon as add() has returned. With
// `kCountersPerKey` counters per key, 0.7 % of the other keys are found, too. A counter that has
// reached 255 stays there: then more of the other keys are found.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>

#include "aiokv/journal_record.hpp"

namespace aiokv {

class KeyCounts {
  public:
    static constexpr std::size_t kCountersPerKey = 12;

    KeyCounts() = default;  // counts nothing
    explicit KeyCounts(std::span<std::uint8_t> counters) : counters_(counters) {}

    bool counts() const { return !counters_.empty(); }

    // Any thread.
    void add(const StoreKey& key) const { change(key, 1); }
    void remove(const StoreKey& key) const { change(key, -1); }

    static bool may_have(std::span<const std::uint8_t> counters, const StoreKey& key) {
        return std::ranges::all_of(places(key, counters.size()), [&](std::uint64_t place) {
            return __atomic_load_n(&counters[place], __ATOMIC_ACQUIRE) > 0;
        });
    }

  private:
    static constexpr std::uint8_t kMost = 255;

    // The first 16 bytes of a key are a part of a hash.
    static std::array<std::uint64_t, 4> places(const StoreKey& key, std::size_t num_counters) {
        std::uint64_t first, step;
        std::memcpy(&first, key.data(), sizeof first);
        std::memcpy(&step, key.data() + sizeof first, sizeof step);
        std::array<std::uint64_t, 4> places;
        for (std::uint64_t i = 0; i < places.size(); ++i) {
            places[i] = (first + i * step) % num_counters;
        }
        return places;
    }

    void change(const StoreKey& key, int by) const {
        if (!counts()) return;
        for (const std::uint64_t place : places(key, counters_.size())) {
            const std::atomic_ref<std::uint8_t> counter(counters_[place]);
            std::uint8_t count = counter.load(std::memory_order_relaxed);
            while (count != kMost && (by > 0 || count > 0) &&
                   !counter.compare_exchange_weak(count, static_cast<std::uint8_t>(count + by),
                                                  std::memory_order_release,
                                                  std::memory_order_relaxed)) {
            }
        }
    }

    std::span<std::uint8_t> counters_;
};

}  // namespace aiokv
