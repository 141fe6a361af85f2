// State of the slots of a disk store: which key is where, which slots are free, and which block to
// evict next. At most 56 bytes per slot, index included.
//
//   reserve -> (write the data) -> (journal the add) -> commit -> pin, unpin -> evict or remove
//           -> (journal the removal, make it durable) -> settle -> free again
//
// A slot that lost its key is reused only after `settle`: until the removal is durable, a power cut
// may bring the old record back, which must then find its old data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "aiokv/journal_record.hpp"
#include "aiokv/key_counts.hpp"
#include "aiokv/key_index.hpp"
#include "aiokv/label_counts.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

enum class SlotState : std::uint8_t {
    kUnused,       // above the high-water mark, or free
    kReserved,     // a save writes its data
    kStored,       // in the index
    kRemoved,      // not in the index; loads may still read it
    kUnsettled,    // waits until its removal is durable
    kQuarantined,  // its bytes were wrong
};

// `prev` and `next` belong to the list of the slot's state: recency, free, unsettled or
// quarantined.
struct Slot {
    StoreKey key;
    std::uint32_t previous;
    std::uint32_t next;
    std::uint32_t seconds;  // Unix time of the save
    std::uint16_t pins;
    SlotState state;
};
static_assert(sizeof(Slot) == 48);

// Doubly linked through the slots.
class SlotList {
  public:
    std::uint32_t front() const { return front_; }
    std::uint32_t back() const { return back_; }
    std::size_t size() const { return size_; }
    void push_back(Slab<Slot>& slots, std::uint32_t slot);
    void unlink(Slab<Slot>& slots, std::uint32_t slot);

  private:
    std::uint32_t front_ = kNoSlot;
    std::uint32_t back_ = kNoSlot;
    std::size_t size_ = 0;
};

// Range of Unix times of saves; both ends are included.
struct SaveTimes {
    std::uint32_t oldest = 0;
    std::uint32_t newest = std::numeric_limits<std::uint32_t>::max();

    bool has(std::uint32_t seconds) const { return oldest <= seconds && seconds <= newest; }
};

class SlotTable {
  public:
    // Throws ConfigError unless 1 <= capacity < 2^31.
    explicit SlotTable(std::size_t capacity);
    ~SlotTable();
    SlotTable(const SlotTable&) = delete;
    SlotTable& operator=(const SlotTable&) = delete;

    // Keys that were saved outside `times` count as missing here and in pin().
    void contains(std::span<const StoreKey> keys, SaveTimes times, std::span<bool> found);
    // Sets the slots of keys, or -1. Each slot found becomes the most recently used, and is not
    // reused before unpin().
    void pin(std::span<const StoreKey> keys, SaveTimes times, std::span<std::int32_t> slots);
    void unpin(std::span<const std::int32_t> slots);

    // Returns up to `count` free slots below the limit of grow(), in rising order.
    std::vector<std::int32_t> reserve(std::size_t count);
    // Gives back slots of reserve() about which no record was written.
    void release(std::span<const std::int32_t> slots);
    // Call when the data of reserved slots and their records are written. From now on the keys can
    // be found. A key that was stored meanwhile moves to the new slot.
    void commit(std::span<const StoreKey> keys, std::span<const std::int32_t> slots,
                std::uint32_t seconds);
    // Gives back reserved slots about which a record may have been written.
    void discard(std::span<const StoreKey> keys, std::span<const std::int32_t> slots);
    // Adds `count` slots that now exist on the medium.
    void grow(std::size_t count);

    // Removes keys. Returns how many of them were stored.
    std::size_t remove(std::span<const StoreKey> keys);
    std::size_t quarantine(std::span<const StoreKey> keys);
    // Removes the `count` least recently used keys that are not pinned, or fewer. Returns their
    // number.
    std::size_t evict(std::size_t count);

    // Returns the records of removals since the last call. A removal is durable once its record is.
    std::vector<JournalRecord> take_records();
    // Number of slots that have become unsettled so far. When the records taken until now are
    // durable, settle(this number) frees those slots, at most `count` per call. Returns true when
    // none is left.
    std::uint64_t unsettled_total() const { return unsettled_total_; }
    bool settle(std::uint64_t total, std::size_t count);

    // Starts to list all slots with a key, least recently used first, and then those in quarantine.
    // snapshot() returns the next ones, and nothing at the end. If a slot changes meanwhile, it is
    // listed with its new state, or twice.
    void begin_snapshot();
    std::vector<JournalRecord> snapshot(std::size_t count);

    // Appends to `keys` those of `count` slots from `first` on that end with `label`.
    void list_keys(std::size_t first, std::size_t count, std::span<const std::uint8_t> label,
                   std::vector<StoreKey>& keys) const;
    // Returns the `count` most recently used keys or fewer, the last one used first.
    std::vector<StoreKey> newest(std::size_t count) const;
    // Numbers of stored keys by their labels: see aiokv/stores/labels.py.
    const LabelCounts& labels() const { return labels_; }

    // Applies a record of the journal. Call before all other methods. finish_replay() then makes
    // slots without a key free.
    bool replay(const JournalRecord& record);
    void finish_replay();

    // Counts the stored keys in `counts` until the table is destroyed. Call once.
    void publish(KeyCounts counts);

    std::size_t capacity() const { return capacity_; }
    std::size_t high_water() const { return high_water_; }
    std::size_t limit() const { return limit_; }
    std::size_t stored() const { return recency_.size(); }
    std::size_t quarantined() const { return quarantine_.size(); }
    std::size_t unsettled() const { return unsettled_.size(); }
    std::size_t available() const { return free_.size() + limit_ - high_water_; }
    std::size_t bytes() const { return slots_.bytes() + index_.bytes(); }

    // Returns a description of the first violated invariant; empty if all hold. For tests.
    std::string check() const;

  private:
    std::uint32_t find(const StoreKey& key) const;
    template <class Visit>
    void find_all(std::span<const StoreKey> keys, SaveTimes times, Visit visit);
    void touch(std::uint32_t slot);
    void unlink_stored(std::uint32_t slot);
    // Takes the key from a stored slot.
    void drop(std::uint32_t slot, RecordKind kind);
    void make_unsettled(std::uint32_t slot);
    void require(std::int32_t slot, SlotState state, const char* operation) const;
    void store(std::uint32_t slot, const StoreKey& key, std::uint32_t seconds);
    void erase_replayed(std::uint32_t slot);
    void raise_high_water(std::uint32_t slot);
    template <class Visit>
    void for_each_stored(Visit visit) const;

    std::size_t capacity_;
    std::size_t limit_ = 0;       // slots that exist on the medium
    std::size_t high_water_ = 0;  // slots that were ever reserved
    Slab<Slot> slots_;
    KeyIndex index_;
    LabelCounts labels_;
    KeyCounts counts_;
    SlotList recency_;  // front: least recently used
    SlotList free_;
    SlotList unsettled_;
    SlotList quarantine_;
    std::vector<JournalRecord> records_;
    std::uint64_t unsettled_total_ = 0;
    std::uint64_t settled_total_ = 0;
    std::uint32_t cursor_ = kNoSlot;  // next slot of the snapshot
    bool cursor_in_quarantine_ = false;
};

}  // namespace aiokv
