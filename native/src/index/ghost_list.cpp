#include "aiokv/ghost_list.hpp"

#include <algorithm>

namespace aiokv {
namespace {

constexpr std::uint32_t tag_of(std::uint64_t key) {
    return key & 0x7ff;
}

}  // namespace

GhostList::GhostList(std::size_t entries)
    : table_(std::max<std::size_t>(128, entries / kWays) * kWays,
             std::max<std::size_t>(128, entries / kWays) * kWays) {
    table_.grow(std::max<std::size_t>(128, entries / kWays) * kWays);
}

GhostList::Entry* GhostList::find(std::uint64_t key, std::uint64_t now) {
    for (Entry& entry : set_of(key)) {
        if (entry.tag != tag_of(key) || entry.added == 0) continue;
        return age(entry, now) < kWindowUnits ? &entry : nullptr;
    }
    return nullptr;
}

GhostList::Entry& GhostList::replace(std::uint64_t key, std::uint64_t now) {
    Entry* victim = nullptr;
    std::uint64_t victim_age = 0;
    for (Entry& entry : set_of(key)) {
        const bool is_empty = entry.added == 0;
        const bool is_same = !is_empty && entry.tag == tag_of(key);
        const std::uint64_t entry_age = is_empty ? 2 * kWindowUnits : age(entry, now);
        if (victim == nullptr || is_same || entry_age > victim_age) {
            victim = &entry;
            victim_age = entry_age;
        }
        if (is_same) break;
    }
    *victim = Entry{};
    if (!labels_.empty()) labels_[index_of(*victim)] = 0;
    victim->tag = tag_of(key);
    return *victim;
}

void GhostList::set_label(const Entry& entry, std::uint32_t label) {
    if (labels_.empty() && label == 0) return;
    labels_.resize(table_.size());
    labels_[index_of(entry)] = static_cast<std::uint8_t>(label);
}

}  // namespace aiokv
