#include "aiokv/slot_table.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

constexpr std::size_t kPrefetched = 16;  // keys whose cache lines are prefetched at a time

}  // namespace

void SlotList::push_back(Slab<Slot>& slots, std::uint32_t slot) {
    slots[slot].previous = back_;
    slots[slot].next = kNoSlot;
    (back_ == kNoSlot ? front_ : slots[back_].next) = slot;
    back_ = slot;
    ++size_;
}

void SlotList::unlink(Slab<Slot>& slots, std::uint32_t slot) {
    const Slot& entry = slots[slot];
    (entry.previous == kNoSlot ? front_ : slots[entry.previous].next) = entry.next;
    (entry.next == kNoSlot ? back_ : slots[entry.next].previous) = entry.previous;
    --size_;
}

SlotTable::SlotTable(std::size_t capacity)
    : capacity_(capacity),
      slots_(capacity, 0, Pages::kSmall),
      index_(capacity < (std::size_t{1} << 31) ? capacity : 0) {
    if (capacity == 0 || capacity >= (std::size_t{1} << 31)) {
        throw ConfigError("a disk store of " + std::to_string(capacity) +
                          " slots; it must have between 1 and 2147483647");
    }
}

template <class Visit>
void SlotTable::for_each_stored(Visit visit) const {
    for (std::uint32_t slot = 0; slot < high_water_; ++slot) {
        if (slots_[slot].state == SlotState::kStored) visit(slots_[slot].key);
    }
}

SlotTable::~SlotTable() {
    if (!counts_.counts()) return;
    for_each_stored([&](const StoreKey& key) { counts_.remove(key); });
}

std::uint32_t SlotTable::find(const StoreKey& key) const {
    return index_.find(KeyIndex::hash(key), key, slots_);
}

// Prefetches the lines of several keys before it reads the first, because the index of a large
// store is not in the processor's caches.
template <class Visit>
void SlotTable::find_all(std::span<const StoreKey> keys, SaveTimes times, Visit visit) {
    std::array<std::uint64_t, kPrefetched> hashes;
    for (std::size_t begin = 0; begin < keys.size(); begin += kPrefetched) {
        const std::size_t count = std::min(kPrefetched, keys.size() - begin);
        for (std::size_t i = 0; i < count; ++i) {
            hashes[i] = KeyIndex::hash(keys[begin + i]);
            index_.prefetch(hashes[i]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t slot = index_.candidate(hashes[i]);
            if (slot != kNoSlot) __builtin_prefetch(&slots_[slot]);
        }
        for (std::size_t i = 0; i < count; ++i) {
            std::uint32_t slot = index_.find(hashes[i], keys[begin + i], slots_);
            if (slot != kNoSlot && !times.has(slots_[slot].seconds)) slot = kNoSlot;
            visit(begin + i, slot);
        }
    }
}

void SlotTable::contains(std::span<const StoreKey> keys, SaveTimes times, std::span<bool> found) {
    find_all(keys, times, [&](std::size_t i, std::uint32_t slot) { found[i] = slot != kNoSlot; });
}

void SlotTable::pin(std::span<const StoreKey> keys, SaveTimes times,
                    std::span<std::int32_t> slots) {
    find_all(keys, times, [&](std::size_t i, std::uint32_t slot) {
        slots[i] = -1;
        if (slot == kNoSlot) return;
        if (slots_[slot].pins == std::numeric_limits<std::uint16_t>::max()) {
            throw InternalError("slot " + std::to_string(slot) + " has too many readers");
        }
        ++slots_[slot].pins;
        touch(slot);
        slots[i] = static_cast<std::int32_t>(slot);
    });
}

void SlotTable::unpin(std::span<const std::int32_t> slots) {
    for (const std::int32_t id : slots) {
        const auto slot = static_cast<std::uint32_t>(id);
        if (id < 0 || slot >= high_water_ || slots_[slot].pins == 0) {
            throw InternalError("slot " + std::to_string(id) + " has no reader");
        }
        --slots_[slot].pins;
        if (slots_[slot].state == SlotState::kRemoved && slots_[slot].pins == 0) {
            make_unsettled(slot);
        }
    }
}

std::vector<std::int32_t> SlotTable::reserve(std::size_t count) {
    std::vector<std::int32_t> taken;
    taken.reserve(std::min(count, available()));
    while (taken.size() < count && free_.size() > 0) {
        const std::uint32_t slot = free_.front();
        free_.unlink(slots_, slot);
        slots_[slot].state = SlotState::kReserved;
        taken.push_back(static_cast<std::int32_t>(slot));
    }
    while (taken.size() < count && high_water_ < limit_) {
        const auto slot = static_cast<std::uint32_t>(high_water_);
        raise_high_water(slot);
        slots_[slot].state = SlotState::kReserved;
        taken.push_back(static_cast<std::int32_t>(slot));
    }
    std::sort(taken.begin(), taken.end());
    return taken;
}

void SlotTable::release(std::span<const std::int32_t> slots) {
    for (const std::int32_t slot : slots) require(slot, SlotState::kReserved, "release");
    for (const std::int32_t slot : slots) {
        slots_[static_cast<std::uint32_t>(slot)].state = SlotState::kUnused;
        free_.push_back(slots_, static_cast<std::uint32_t>(slot));
    }
}

void SlotTable::commit(std::span<const StoreKey> keys, std::span<const std::int32_t> slots,
                       std::uint32_t seconds) {
    for (const std::int32_t slot : slots) require(slot, SlotState::kReserved, "commit");
    for (std::size_t i = 0; i < slots.size(); ++i) {
        counts_.add(keys[i]);  // before the removal of its earlier slot: other processes look
        const std::uint32_t earlier = find(keys[i]);
        if (earlier != kNoSlot) drop(earlier, RecordKind::kRemove);
        store(static_cast<std::uint32_t>(slots[i]), keys[i], seconds);
        labels_.add(keys[i]);
    }
}

void SlotTable::discard(std::span<const StoreKey> keys, std::span<const std::int32_t> slots) {
    for (const std::int32_t slot : slots) require(slot, SlotState::kReserved, "discard");
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto slot = static_cast<std::uint32_t>(slots[i]);
        records_.push_back({.kind = RecordKind::kRemove, .slot = slot, .key = keys[i]});
        make_unsettled(slot);
    }
}

void SlotTable::grow(std::size_t count) {
    if (count > capacity_ - limit_) {
        throw InternalError("grow: " + std::to_string(count) + " slots exceed the capacity");
    }
    limit_ += count;
}

std::size_t SlotTable::remove(std::span<const StoreKey> keys) {
    std::size_t removed = 0;
    find_all(keys, {}, [&](std::size_t, std::uint32_t slot) {
        if (slot == kNoSlot) return;
        drop(slot, RecordKind::kRemove);
        ++removed;
    });
    return removed;
}

std::size_t SlotTable::quarantine(std::span<const StoreKey> keys) {
    std::size_t removed = 0;
    find_all(keys, {}, [&](std::size_t, std::uint32_t slot) {
        if (slot == kNoSlot) return;
        drop(slot, RecordKind::kQuarantine);
        ++removed;
    });
    return removed;
}

std::size_t SlotTable::evict(std::size_t count) {
    std::size_t evicted = 0;
    std::uint32_t slot = recency_.front();
    while (evicted < count && slot != kNoSlot) {
        const std::uint32_t next = slots_[slot].next;
        if (next != kNoSlot) __builtin_prefetch(&slots_[next]);
        if (slots_[slot].pins == 0) {
            drop(slot, RecordKind::kRemove);
            ++evicted;
        }
        slot = next;
    }
    return evicted;
}

std::vector<JournalRecord> SlotTable::take_records() {
    return std::exchange(records_, {});
}

bool SlotTable::settle(std::uint64_t total, std::size_t count) {
    for (; settled_total_ < total && count > 0; ++settled_total_, --count) {
        const std::uint32_t slot = unsettled_.front();
        unsettled_.unlink(slots_, slot);
        slots_[slot].state = SlotState::kUnused;
        free_.push_back(slots_, slot);
    }
    return settled_total_ >= total;
}

void SlotTable::begin_snapshot() {
    cursor_in_quarantine_ = quarantine_.size() > 0;
    cursor_ = cursor_in_quarantine_ ? quarantine_.front() : recency_.front();
}

std::vector<JournalRecord> SlotTable::snapshot(std::size_t count) {
    std::vector<JournalRecord> records;
    records.reserve(count);
    while (records.size() < count && cursor_ != kNoSlot) {
        const Slot& entry = slots_[cursor_];
        records.push_back(
            {.kind = cursor_in_quarantine_ ? RecordKind::kQuarantine : RecordKind::kAdd,
             .slot = cursor_,
             .key = entry.key,
             .seconds = entry.seconds});
        cursor_ = entry.next;
        if (cursor_ == kNoSlot && std::exchange(cursor_in_quarantine_, false)) {
            cursor_ = recency_.front();
        }
    }
    return records;
}

void SlotTable::list_keys(std::size_t first, std::size_t count, std::span<const std::uint8_t> label,
                          std::vector<StoreKey>& keys) const {
    for (std::size_t slot = first; slot < std::min(first + count, high_water_); ++slot) {
        const StoreKey& key = slots_[slot].key;
        if (slots_[slot].state != SlotState::kStored) continue;
        if (std::equal(label.begin(), label.end(), key.end() - label.size())) keys.push_back(key);
    }
}

std::vector<StoreKey> SlotTable::newest(std::size_t count) const {
    std::vector<StoreKey> keys;
    for (std::uint32_t slot = recency_.back(); slot != kNoSlot && keys.size() < count;
         slot = slots_[slot].previous) {
        keys.push_back(slots_[slot].key);
    }
    return keys;
}

// Applies records in order, so that the last one wins: that was the state in memory.
bool SlotTable::replay(const JournalRecord& record) {
    if (record.slot >= capacity_) return false;
    raise_high_water(record.slot);
    Slot& entry = slots_[record.slot];
    const bool stored = entry.state == SlotState::kStored;
    switch (record.kind) {
        case RecordKind::kAdd: {
            if (stored) erase_replayed(record.slot);
            if (entry.state == SlotState::kQuarantined) return false;
            const std::uint32_t earlier = find(record.key);
            if (earlier != kNoSlot) erase_replayed(earlier);
            store(record.slot, record.key, record.seconds);  // finish_replay() counts its labels
            return true;
        }
        case RecordKind::kRemove:
            if (stored && entry.key == record.key) erase_replayed(record.slot);
            return true;
        case RecordKind::kQuarantine:
            if (stored) erase_replayed(record.slot);
            if (entry.state == SlotState::kQuarantined) return true;
            entry.state = SlotState::kQuarantined;
            quarantine_.push_back(slots_, record.slot);
            return true;
        default:
            return true;
    }
}

void SlotTable::finish_replay() {
    for (std::uint32_t slot = 0; slot < high_water_; ++slot) {
        if (slots_[slot].state == SlotState::kUnused) free_.push_back(slots_, slot);
    }
    for_each_stored([&](const StoreKey& key) { labels_.add(key); });
    limit_ = std::max(limit_, high_water_);
}

void SlotTable::publish(KeyCounts counts) {
    counts_ = counts;
    for_each_stored([&](const StoreKey& key) { counts_.add(key); });
}

void SlotTable::touch(std::uint32_t slot) {
    const bool stays_next = slot == cursor_ && slots_[slot].next == kNoSlot;
    unlink_stored(slot);
    recency_.push_back(slots_, slot);
    if (stays_next) cursor_ = slot;
}

void SlotTable::unlink_stored(std::uint32_t slot) {
    if (slot == cursor_) cursor_ = slots_[slot].next;
    recency_.unlink(slots_, slot);
}

void SlotTable::drop(std::uint32_t slot, RecordKind kind) {
    Slot& entry = slots_[slot];
    index_.erase(KeyIndex::hash(entry.key), slot, slots_);
    labels_.remove(entry.key);
    counts_.remove(entry.key);
    unlink_stored(slot);
    records_.push_back({.kind = kind, .slot = slot, .key = entry.key});
    if (kind == RecordKind::kQuarantine) {
        entry.state = SlotState::kQuarantined;
        quarantine_.push_back(slots_, slot);
    } else if (entry.pins > 0) {
        entry.state = SlotState::kRemoved;
    } else {
        make_unsettled(slot);
    }
}

void SlotTable::make_unsettled(std::uint32_t slot) {
    slots_[slot].state = SlotState::kUnsettled;
    unsettled_.push_back(slots_, slot);
    ++unsettled_total_;
}

void SlotTable::require(std::int32_t slot, SlotState state, const char* operation) const {
    if (slot >= 0 && static_cast<std::size_t>(slot) < high_water_ &&
        slots_[static_cast<std::size_t>(slot)].state == state) {
        return;
    }
    throw InternalError(std::string(operation) + ": slot " + std::to_string(slot) +
                        " is in another state");
}

void SlotTable::store(std::uint32_t slot, const StoreKey& key, std::uint32_t seconds) {
    Slot& entry = slots_[slot];
    entry.key = key;
    entry.seconds = seconds;
    entry.state = SlotState::kStored;
    index_.insert(KeyIndex::hash(key), slot);
    recency_.push_back(slots_, slot);
}

void SlotTable::erase_replayed(std::uint32_t slot) {
    index_.erase(KeyIndex::hash(slots_[slot].key), slot, slots_);
    recency_.unlink(slots_, slot);
    slots_[slot].state = SlotState::kUnused;
}

void SlotTable::raise_high_water(std::uint32_t slot) {
    if (slot < high_water_) return;
    slots_.grow(slot + 1 - high_water_);
    high_water_ = slot + 1;
}

std::string SlotTable::check() const {
    std::array<std::size_t, 6> states{};
    for (std::size_t slot = 0; slot < high_water_; ++slot) {
        const Slot& entry = slots_[slot];
        ++states[static_cast<std::size_t>(entry.state)];
        if (entry.state == SlotState::kRemoved && entry.pins == 0) {
            return "slot " + std::to_string(slot) + " is removed without a reader";
        }
        if (entry.state == SlotState::kStored && find(entry.key) != slot) {
            return "the key of slot " + std::to_string(slot) + " is not found";
        }
    }
    const auto count = [&](SlotState state) { return states[static_cast<std::size_t>(state)]; };
    if (count(SlotState::kStored) != recency_.size()) return "stored slots and recency differ";
    if (count(SlotState::kUnused) != free_.size()) return "unused slots and free list differ";
    if (count(SlotState::kUnsettled) != unsettled_.size()) return "unsettled slots differ";
    if (count(SlotState::kQuarantined) != quarantine_.size()) return "quarantined slots differ";
    if (high_water_ > limit_ || limit_ > capacity_) return "the limits are out of order";
    return "";
}

}  // namespace aiokv
