// Rebuilds a slot table from the records of a journal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/journal_record.hpp"
#include "aiokv/slot_table.hpp"

namespace aiokv {

// Applies removals always. Applies an add if a later kSynced record proves that its data is
// durable, or if the machine has not booted since the add was written, because unflushed writes
// cannot be lost then.
class JournalReplay {
  public:
    // `table`: a new table, which must exist until finish(). `boot`: identifies the present boot.
    // Ignores slots from num_slots on, which no longer exist.
    JournalReplay(SlotTable& table, std::uint64_t epoch, const StoreKey& boot,
                  std::size_t num_slots)
        : table_(table), epoch_(epoch), boot_(boot), num_slots_(num_slots) {}

    // Reads the next records of the file. Only the last call may end with a partial record.
    void feed(std::span<const std::uint8_t> bytes);
    // Applies the remaining records, and makes the slots without a key free.
    void finish();

    std::uint64_t end() const { return end_; }            // position behind the last valid record
    std::uint64_t damaged() const { return damaged_; }    // invalid records before end()
    std::uint64_t torn() const { return torn_; }          // invalid records behind end()
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
    std::vector<JournalRecord> waiting_;  // records since the last kSynced
    std::uint64_t position_ = 0;
    std::uint64_t end_ = 0;
    std::uint64_t damaged_ = 0;
    std::uint64_t torn_ = 0;
    std::uint64_t unproven_ = 0;
    std::uint64_t outside_ = 0;
};

}  // namespace aiokv
