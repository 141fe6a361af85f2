#include "aiokv/journal_replay.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace aiokv {

void JournalReplay::feed(std::span<const std::uint8_t> bytes) {
    while (!bytes.empty()) {
        JournalRecord record;
        const std::size_t size = std::min(bytes.size(), sizeof(record));
        std::memcpy(&record, bytes.data(), size);
        bytes = bytes.subspan(size);
        const std::uint64_t position = position_++;
        if (size < sizeof(record) || record.checksum != record_checksum(record, epoch_, position)) {
            ++torn_;
            continue;
        }
        damaged_ += std::exchange(torn_, 0);
        end_ = position + 1;
        read(record);
    }
}

void JournalReplay::finish() {
    apply_waiting(same_boot_);
    table_.finish_replay();
}

void JournalReplay::read(const JournalRecord& record) {
    switch (record.kind) {
        case RecordKind::kSynced:
            return apply_waiting(true);
        case RecordKind::kSession:
            apply_waiting(same_boot_);
            same_boot_ = record.key == boot_;
            return;
        default:
            waiting_.push_back(record);
    }
}

void JournalReplay::apply_waiting(bool proven) {
    for (const JournalRecord& record : waiting_) {
        if (!proven && record.kind == RecordKind::kAdd) {
            ++unproven_;
        } else {
            apply(record);
        }
    }
    waiting_.clear();
}

void JournalReplay::apply(const JournalRecord& record) {
    if (record.slot >= num_slots_ || !table_.replay(record)) ++outside_;
}

}  // namespace aiokv
