// Rebuilds a slot table from the records of a journal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/journal_record.hpp"
#include "aiokv/slot_table.hpp"

namespace aiokv {

// An add is applied when a kSynced record below it proves that its data is durable, or when the
// machine has not booted since the add was written: then writes that the disk had not flushed
// cannot be lost. Removals are always applied.
class JournalReplay {
  public:
    // `table` is new, and must exist until finish(). `boot` identifies the present boot.
    // Slots from num_slots on do not exist any more.
    JournalReplay(SlotTable& table, std::uint64_t epoch, const StoreKey& boot,
                  std::size_t num_slots)
        : table_(table), epoch_(epoch), boot_(boot), num_slots_(num_slots) {}

    // The next records of the file, whole ones except at its end.
    void feed(std::span<const std::uint8_t> bytes);
    // Apply what is left, and make the slots without a key free.
    void finish();

    std::uint64_t end() const { return end_; }            // position behind the last valid record
    std::uint64_t damaged() const { return damaged_; }    // invalid records before it
    std::uint64_t torn() const { return torn_; }          // invalid records behind it
    std::uint64_t unproven() const { return unproven_; }  // adds dropped after a power cut
    std::uint64_t outside() const { return outside_; }    // adds to slots that no longer exist

  private:
    void read(const JournalRecord& record);
    void apply_waiting(bool proven);
    void apply(const JournalRecord& record);

    SlotTable& table_;
    std::uint64_t epoch_;
    StoreKey boot_;
    std::size_t num_slots_;
    bool same_boot_ = false;              // the records were written since the last boot
    std::vector<JournalRecord> waiting_;  // since the last kSynced
    std::uint64_t position_ = 0;
    std::uint64_t end_ = 0;
    std::uint64_t damaged_ = 0;
    std::uint64_t torn_ = 0;
    std::uint64_t unproven_ = 0;
    std::uint64_t outside_ = 0;
};

}  // namespace aiokv
