// A cache without blocks: it tells which stretches of 512 tokens a tier would hold under one
// policy.
//
// The stretches are found by their fingerprints. It evicts with the queue of the real cache, so its
// hits are those of a tier that had always followed the policy.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/eviction_queue.hpp"
#include "aiokv/reuse_model.hpp"

namespace aiokv {

class ShadowCache {
  public:
    struct Stretch {
        std::uint32_t prev;
        std::uint32_t next;
        std::uint32_t next_in_slot;
        std::uint32_t tag;
        ReuseClass reuse_class;
    };
    using Stretches = std::vector<Stretch>;

    // `room`: capacity in stretches. Evicts by recency without a model, else in the order that
    // choose() sets.
    ShadowCache(std::uint32_t room, const ReuseModel* model);
    ShadowCache(const ShadowCache&) = delete;

    void choose(EvictionRank rank) { queue_.choose(rank); }

    // Uses a prompt that fits in the cache. Returns how many of its leading stretches were cached.
    std::uint32_t use(std::span<const std::uint64_t> keys, std::span<const ReuseClass> classes);
    // Gives the cached ones of these stretches other classes, as if they were used now.
    void reclassify(std::span<const std::uint64_t> keys, std::span<const ReuseClass> classes);
    void resize(std::uint32_t room) { room_ = room; }
    std::size_t bytes() const {
        return stretches_.capacity() * sizeof(Stretch) + slots_.capacity() * 4 + queue_.bytes();
    }

  private:
    using Id = std::uint32_t;
    static constexpr Id kNil = EvictionQueue<Stretches>::kNil;

    Id& slot_of(std::uint32_t tag) { return slots_[tag & (slots_.size() - 1)]; }
    Id find(std::uint32_t tag);
    Id insert(std::uint32_t tag);
    void evict_one();

    std::uint32_t room_;
    std::uint32_t held_ = 0;
    bool has_classes_;
    Stretches stretches_;
    std::vector<Id> slots_;  // hash table of chains
    std::vector<Id> free_;
    std::vector<Id> prompt_;
    EvictionQueue<Stretches> queue_;
};

}  // namespace aiokv
