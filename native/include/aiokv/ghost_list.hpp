// Stretches of prompts that were requested lately, evicted or not: 4 bytes per stretch.
//
// A stretch is found by a fingerprint of the prefix that ends with it. The list remembers
// kWindowUnits of the model's clock, several times the capacity. A wrong fingerprint costs a wrong
// guess, never a wrong hit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/slab.hpp"

namespace aiokv {

class GhostList {
  public:
    static constexpr std::uint32_t kWindowUnits = 2048;  // half the range of Entry::time

    struct Entry {
        std::uint32_t time : 12 = 0;  // last use in units, modulo 2 windows
        std::uint32_t tag : 11 = 0;
        std::uint32_t uses : 3 = 0;   // feature values of the last use; see ReturnRates
        std::uint32_t added : 2 = 0;  // value of the feature plus 1; 0: the entry is empty
        std::uint32_t gap : 3 = 0;
        std::uint32_t forked : 1 = 0;  // 1: a prompt has left the known path behind this stretch
    };
    static_assert(sizeof(Entry) == 4);

    explicit GhostList(std::size_t entries);

    static std::uint64_t age(const Entry& entry, std::uint64_t now) {
        return (now - entry.time) % (2 * kWindowUnits);
    }
    // Prefetches the entries that may have this key. Call some time before they are read.
    void prefetch(std::uint64_t key) { __builtin_prefetch(set_of(key).data(), 1); }
    Entry* find(std::uint64_t key, std::uint64_t now);
    // Label of the last request with this stretch; 0 for none. The first label allocates one byte
    // per entry.
    std::uint32_t label_of(const Entry& entry) const {
        return labels_.empty() ? 0 : labels_[index_of(entry)];
    }
    void set_label(const Entry& entry, std::uint32_t label);
    // Returns a cleared entry for this key: the entry that has it, else an empty one, else the
    // oldest.
    Entry& replace(std::uint64_t key, std::uint64_t now);
    // Visits the next `entries` entries of the list and forgets those that are too old. Each entry
    // must be visited at least once per window, before its time can wrap.
    template <class Visit>
    void sweep(std::size_t entries, std::uint64_t now, Visit visit) {
        for (std::size_t i = 0; i < entries; ++i) {
            Entry& entry = table_[sweep_at_];
            if (++sweep_at_ == table_.size()) sweep_at_ = 0;
            if (entry.added == 0) continue;
            const std::uint64_t age = GhostList::age(entry, now);
            if (age >= kWindowUnits) {
                entry = Entry{};
            } else {
                visit(entry, age);
            }
        }
    }
    std::size_t size() const { return table_.size(); }
    std::size_t bytes() const { return table_.bytes() + labels_.capacity(); }

  private:
    static constexpr std::size_t kWays = 8;

    std::span<Entry> set_of(std::uint64_t key) {
        return {&table_[((key >> 32) * (table_.size() / kWays) >> 32) * kWays], kWays};
    }

    std::size_t index_of(const Entry& entry) const {
        return static_cast<std::size_t>(&entry - &table_[0]);
    }

    Slab<Entry> table_;                 // huge pages, because random reads would miss the TLB
    std::vector<std::uint8_t> labels_;  // by entry; empty before the first label
    std::size_t sweep_at_ = 0;
};

}  // namespace aiokv
