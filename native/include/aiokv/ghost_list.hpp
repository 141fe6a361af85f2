// Stretches of prompts that were requested lately, evicted or not: 4 bytes per stretch.
//
// A stretch is found by a fingerprint of the prefix that ends with it. The list remembers
// kWindowUnits of the model's clock, several times the capacity. A wrong fingerprint costs a wrong
// guess, never a wrong hit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "aiokv/slab.hpp"

namespace aiokv {

class GhostList {
  public:
    static constexpr std::uint32_t kWindowUnits = 2048;  // half of what Entry::time can tell apart

    struct Entry {
        std::uint32_t time : 12 = 0;  // last use in units, modulo 2 windows
        std::uint32_t tag : 11 = 0;
        std::uint32_t uses : 3 = 0;   // feature values of the last use; see ReturnRates
        std::uint32_t added : 2 = 0;  // and one more; 0: no entry
        std::uint32_t gap : 3 = 0;
        std::uint32_t forked : 1 = 0;  // a prompt has left the known path behind it before
    };
    static_assert(sizeof(Entry) == 4);

    explicit GhostList(std::size_t entries);

    static std::uint64_t age(const Entry& entry, std::uint64_t now) {
        return (now - entry.time) % (2 * kWindowUnits);
    }
    // The entries that may have that name are needed soon.
    void prefetch(std::uint64_t key) { __builtin_prefetch(set_of(key).data(), 1); }
    Entry* find(std::uint64_t key, std::uint64_t now);
    // The entry of that name if there is one, else an empty one, else the oldest; cleared.
    Entry& replace(std::uint64_t key, std::uint64_t now);
    // The next `entries` entries, in turns; what is too old is forgotten. All must have their turn
    // once in a window, before a time can wrap.
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
    std::size_t bytes() const { return table_.bytes(); }

  private:
    static constexpr std::size_t kWays = 8;

    std::span<Entry> set_of(std::uint64_t key) {
        return {&table_[((key >> 32) * (table_.size() / kWays) >> 32) * kWays], kWays};
    }

    Slab<Entry> table_;  // read at random: huge pages save a page walk per stretch
    std::size_t sweep_at_ = 0;
};

}  // namespace aiokv
