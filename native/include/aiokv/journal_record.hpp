// Records of the disk store's journal. A record is valid only in the file and at the position that
// it was stamped for: records of an older file and records in a wrong place fail the checksum.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <type_traits>

namespace aiokv {

static_assert(std::endian::native == std::endian::little, "the journal is little-endian");

using StoreKey = std::array<std::uint8_t, 32>;

enum class RecordKind : std::uint32_t {
    kAdd = 1,         // `key` is in `slot`, saved at `seconds`
    kRemove = 2,      // `key` is no longer in `slot`
    kQuarantine = 3,  // `slot` is not used any more; it held `key`, or nothing
    kSynced = 4,      // the data of all records above is durable
    kSession = 5,     // a process has begun to write; `key` identifies the machine's boot
};

// 64 bytes: a record never crosses a sector of the disk.
struct JournalRecord {
    std::uint64_t checksum = 0;
    RecordKind kind{};
    std::uint32_t slot = 0;
    StoreKey key{};
    std::uint32_t seconds = 0;  // Unix time
    std::array<std::uint32_t, 3> reserved{};
};
static_assert(sizeof(JournalRecord) == 64 && std::is_trivially_copyable_v<JournalRecord>);

// Returns the checksum of a record in file `epoch`, at index `position` behind the header.
std::uint64_t record_checksum(const JournalRecord& record, std::uint64_t epoch,
                              std::uint64_t position);

// Sets the checksums of records that will be written from `position` on.
void stamp_records(std::span<JournalRecord> records, std::uint64_t epoch, std::uint64_t position);

}  // namespace aiokv
