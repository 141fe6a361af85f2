// When do prefixes come back? Learned from a table of what was asked for lately, evicted or not.
//
// A prompt is looked at in stretches of 512 tokens. A 4-byte entry of the table, found by a
// fingerprint of the prefix, says when a stretch was asked for last, how often before, and whether
// conversations part behind it. That is the ghost list: it remembers several times the capacity.
// Stretches are sorted into classes (how often asked for; how much the last prompt added), and of
// each class the model counts, by age, how many were waiting and how many came back. The score of
// (class, age) is the best rate of hits per block and time that keeping such a block longer can
// bring: Gittins' index. A wrong fingerprint costs a wrong guess, never a wrong hit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace aiokv {

// Which blocks go first. lru: the least recently used; s3fifo: by class and age, as learned.
enum class EvictionKind : std::uint8_t { kLru, kS3Fifo };

using ReuseClass = std::uint8_t;

class ReuseModel {
  public:
    static constexpr std::uint32_t kClasses = 24;  // 8 of use counts x 3 of lengths added

    // `capacity_blocks` is that of the largest tier.
    ReuseModel(std::uint32_t block_tokens, std::uint32_t capacity_blocks);

    // Account for a prompt: the class of each of its stretches, then of what follows them.
    void observe(std::span<const std::int32_t> tokens, std::uint64_t seed,
                 std::vector<ReuseClass>& classes);

    // Counts up whenever scores may have changed; queues then sort their segments anew.
    std::uint64_t epoch() const { return epoch_; }
    std::uint64_t now() const { return now_; }
    // Of block `index` of the prompt that `classes` was observed for, if it was.
    ReuseClass class_at(const std::vector<ReuseClass>& classes, std::size_t index) const {
        if (classes.empty()) return 0;
        return classes[std::min(index >> stretch_shift_, classes.size() - 1)];
    }

    // Higher: keep longer. `age` in units of now().
    double score(ReuseClass reuse_class, std::uint64_t age) const {
        return scores_[reuse_class][age_bucket(age)];
    }
    // By how much the scores should beat LRU at this capacity, as a share of LRU's hits.
    double predicted_gain(std::uint32_t capacity_blocks) const;
    bool is_warm() const { return clock_ >= kWarmCapacities * capacity_; }
    std::size_t bytes() const { return table_.capacity() * sizeof(Entry); }

  private:
    static constexpr std::uint32_t kStretchTokens = 512;
    static constexpr std::uint32_t kUnitsPerCapacity = 64;
    static constexpr std::uint32_t kWindowUnits = 2048;  // 32 capacities; half of the time field
    static constexpr std::uint32_t kWays = 8;
    static constexpr std::uint32_t kBuckets = 21;  // two an octave of age
    static constexpr std::uint64_t kWarmCapacities = 4;
    static constexpr std::uint64_t kMinEpochTicks = 1024;
    static constexpr std::uint64_t kMinLearnTicks = 4096;

    struct Entry {
        std::uint32_t time : 12 = 0;  // in units, modulo 2 windows
        std::uint32_t tag : 11 = 0;
        std::uint32_t count : 6 = 0;   // 0: no entry
        std::uint32_t forked : 1 = 0;  // a prompt has left the known path behind it before
        std::uint32_t added : 2 = 0;   // class of the length that the last prompt added
    };
    static_assert(sizeof(Entry) == 4);

    using Table = std::array<std::array<double, kBuckets>, kClasses>;
    using Ages = std::array<double, kBuckets>;

    static std::uint32_t age_bucket(std::uint64_t age);
    static double bucket_start(std::uint32_t bucket);
    static ReuseClass class_of(const Entry& entry);
    std::uint32_t age_of(const Entry& entry) const;
    Entry* find(std::uint64_t key);
    Entry& replace(std::uint64_t key);
    std::size_t set_of(std::uint64_t key) const;
    std::size_t find_known(std::span<const std::uint64_t> keys);
    void advance(std::uint64_t ticks);
    void sweep(std::uint64_t ticks);
    void learn();
    void learn_class(std::uint32_t reuse_class, const Ages& base);

    std::uint32_t block_tokens_;
    std::uint32_t stretch_shift_;
    std::uint32_t stretch_blocks_;  // a power of two
    std::uint64_t capacity_;
    std::uint64_t unit_;         // blocks asked for, that make one unit of time
    std::uint64_t epoch_ticks_;  // blocks asked for between two epochs
    std::uint64_t clock_ = 0;    // blocks asked for
    std::uint64_t now_ = 0;      // clock_ in units
    std::uint64_t last_epoch_ = 0;
    std::uint64_t last_learnt_ = 0;
    std::uint64_t epoch_ = 0;

    std::vector<Entry> table_;
    std::size_t sets_;
    std::size_t sweep_at_ = 0;
    std::vector<std::uint64_t> keys_;  // of the prompt being observed
    std::vector<Entry*> known_;

    Table hits_{};      // came back at that age
    Table exposure_{};  // waited at that age, x units; both fade
    Table scores_{};
    double time_ = 0;  // units that exposure_ covers, fading too
};

}  // namespace aiokv
