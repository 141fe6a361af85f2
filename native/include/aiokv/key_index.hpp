// Hash index from store keys to slots. The keys are stored with the slots: the index takes 7.5
// bytes per slot of capacity. It has its full size from the start, so no insertion rehashes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "aiokv/journal_record.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

inline constexpr std::uint32_t kNoSlot = std::numeric_limits<std::uint32_t>::max();

// Open addressing with linear probing. `keys[slot]` is the key of a slot.
class KeyIndex {
  public:
    explicit KeyIndex(std::size_t capacity)
        : num_buckets_(capacity + capacity / 2 + 2),
          tags_(num_buckets_, 0, Pages::kSmall),
          slots_(num_buckets_, 0, Pages::kSmall) {
        tags_.grow(num_buckets_);
        slots_.grow(num_buckets_);
    }

    // Most keys are SHA-256 digests. The multiplication also spreads keys that are not.
    static std::uint64_t hash(const StoreKey& key) {
        std::array<std::uint64_t, 4> words;
        std::memcpy(words.data(), key.data(), sizeof(words));
        std::uint64_t sum = words[0];
        for (std::size_t i = 1; i < 4; ++i) sum = (sum ^ (sum >> 29)) * kFactor + words[i];
        return (sum ^ (sum >> 32)) * kFactor;
    }

    void prefetch(std::uint64_t hash) const {
        __builtin_prefetch(&tags_[bucket(hash)]);
        __builtin_prefetch(&slots_[bucket(hash)]);
    }

    // Returns the first slot with the tag of this hash, whose key probably has to be compared;
    // kNoSlot if there is none. Used to prefetch the key.
    std::uint32_t candidate(std::uint64_t hash) const {
        for (std::size_t at = bucket(hash); tags_[at] != 0; at = next(at)) {
            if (tags_[at] == tag(hash)) return slots_[at];
        }
        return kNoSlot;
    }

    template <class Keys>
    std::uint32_t find(std::uint64_t hash, const StoreKey& key, const Keys& keys) const {
        for (std::size_t at = bucket(hash); tags_[at] != 0; at = next(at)) {
            if (tags_[at] == tag(hash) && keys[slots_[at]].key == key) return slots_[at];
        }
        return kNoSlot;
    }

    // Requires that the index does not have the key of the slot.
    void insert(std::uint64_t hash, std::uint32_t slot) {
        std::size_t at = bucket(hash);
        while (tags_[at] != 0) at = next(at);
        tags_[at] = tag(hash);
        slots_[at] = slot;
    }

    // Removes an entry and closes the gap: moves up the entries that probing would no longer reach.
    template <class Keys>
    void erase(std::uint64_t hash, std::uint32_t slot, const Keys& keys) {
        std::size_t gap = bucket(hash);
        while (tags_[gap] == 0 || slots_[gap] != slot) gap = next(gap);
        for (std::size_t at = next(gap); tags_[at] != 0; at = next(at)) {
            const std::size_t home = bucket(KeyIndex::hash(keys[slots_[at]].key));
            if (distance(home, at) < distance(gap, at)) continue;
            tags_[gap] = tags_[at];
            slots_[gap] = slots_[at];
            gap = at;
        }
        tags_[gap] = 0;
    }

    std::size_t bytes() const { return tags_.bytes() + slots_.bytes(); }

  private:
    static constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15;

    // 0 marks an empty bucket.
    static std::uint8_t tag(std::uint64_t hash) {
        const auto low = static_cast<std::uint8_t>(hash);
        return low == 0 ? 1 : low;
    }
    std::size_t bucket(std::uint64_t hash) const {
        __extension__ using Wide = unsigned __int128;
        return static_cast<std::size_t>((static_cast<Wide>(hash) * num_buckets_) >> 64);
    }
    std::size_t next(std::size_t at) const { return at + 1 == num_buckets_ ? 0 : at + 1; }
    std::size_t distance(std::size_t from, std::size_t to) const {
        return to >= from ? to - from : to + num_buckets_ - from;
    }

    std::size_t num_buckets_;
    Slab<std::uint8_t> tags_;
    Slab<std::uint32_t> slots_;
};

}  // namespace aiokv
