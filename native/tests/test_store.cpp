// The slot table against a map, and the replay of damaged journals.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "aiokv/error.hpp"
#include "aiokv/journal_replay.hpp"
#include "aiokv/slot_table.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

StoreKey key(std::uint32_t number) {
    StoreKey bytes{};
    std::memcpy(bytes.data() + 28, &number, 4);
    return bytes;
}

std::vector<std::int32_t> add(SlotTable& table, const std::vector<StoreKey>& keys) {
    auto slots = table.reserve(keys.size());
    table.commit(std::span(keys).first(slots.size()), slots, 7);
    return slots;
}

std::int32_t slot_of(SlotTable& table, const StoreKey& wanted) {
    std::int32_t slot = -2;
    table.pin({&wanted, 1}, {}, {&slot, 1});
    if (slot >= 0) table.unpin({&slot, 1});
    return slot;
}

const StoreKey kBoot = key(99), kOtherBoot = key(98);
constexpr std::uint64_t kEpoch = 0x1234;

JournalRecord added(std::uint32_t number, std::uint32_t slot) {
    return {.kind = RecordKind::kAdd, .slot = slot, .key = key(number), .seconds = 7};
}
JournalRecord removed(std::uint32_t number, std::uint32_t slot) {
    return {.kind = RecordKind::kRemove, .slot = slot, .key = key(number)};
}
JournalRecord session(const StoreKey& boot) {
    return {.kind = RecordKind::kSession, .key = boot};
}
const JournalRecord kSyncedRecord{.kind = RecordKind::kSynced};

struct Replayed {
    SlotTable table{64};
    JournalReplay replay;
    explicit Replayed(std::vector<JournalRecord> records, std::size_t cut = 0, int flipped = -1,
                      std::size_t num_slots = 64)
        : replay(table, kEpoch, kBoot, num_slots) {
        stamp_records(records, kEpoch, 0);
        std::vector<std::uint8_t> bytes(records.size() * sizeof(JournalRecord));
        std::memcpy(bytes.data(), records.data(), bytes.size());
        bytes.resize(bytes.size() - cut);
        if (flipped >= 0) bytes[static_cast<std::size_t>(flipped)] ^= 0x10;
        replay.feed(bytes);
        replay.finish();
        CHECK_EQ(table.check(), "");
    }
};

}  // namespace

TEST(records_of_slots_that_were_removed_do_not_count) {
    Replayed replayed({session(kBoot), added(1, 0), added(2, 3)}, 0, -1, 3);
    CHECK_EQ(replayed.replay.outside(), 1u);
    CHECK_EQ(replayed.table.stored(), 1u);
    CHECK_EQ(slot_of(replayed.table, key(2)), -1);
}

TEST(slots_are_reserved_found_and_evicted_in_order_of_use) {
    SlotTable table(8);
    CHECK_EQ(table.reserve(3).size(), 0u);
    table.grow(8);
    const auto slots = add(table, {key(0), key(1), key(2), key(3)});
    CHECK_EQ(slots.size(), 4u);
    CHECK_EQ(slot_of(table, key(0)), slots[0]);  // key 1 is now the oldest
    CHECK_EQ(table.evict(1), 1u);
    CHECK_EQ(slot_of(table, key(1)), -1);
    CHECK_EQ(slot_of(table, key(0)), slots[0]);
    CHECK_EQ(table.take_records().size(), 1u);
    CHECK_EQ(table.available(), 4u);
    table.settle(table.unsettled_total(), 100);
    CHECK_EQ(table.available(), 5u);
    CHECK_EQ(table.check(), "");
}

TEST(a_pinned_slot_is_reused_only_after_unpin_and_settle) {
    SlotTable table(1);
    table.grow(1);
    add(table, {key(1)});
    const StoreKey wanted = key(1);
    std::int32_t slot;
    table.pin({&wanted, 1}, {}, {&slot, 1});
    CHECK_EQ(table.evict(1), 0u);
    CHECK_EQ(table.remove({&wanted, 1}), 1u);
    table.settle(table.unsettled_total(), 100);
    CHECK_EQ(table.available(), 0u);
    table.unpin({&slot, 1});
    CHECK_EQ(table.available(), 0u);
    table.settle(table.unsettled_total(), 100);
    CHECK_EQ(table.available(), 1u);
    CHECK_THROWS(InternalError, (table.unpin({&slot, 1}), 0));
}

TEST(a_second_save_of_a_key_moves_it) {
    SlotTable table(4);
    table.grow(4);
    const auto first = add(table, {key(1)});
    const auto second = add(table, {key(1)});
    CHECK_EQ(slot_of(table, key(1)), second[0]);
    CHECK_EQ(table.stored(), 1u);
    CHECK_EQ(table.unsettled(), 1u);
    const auto records = table.take_records();
    CHECK_EQ(records.size(), 1u);
    CHECK_EQ(records[0].slot, static_cast<std::uint32_t>(first[0]));
}

TEST(expired_keys_are_missing) {
    SlotTable table(1);
    table.grow(1);
    add(table, {key(1)});
    const StoreKey wanted = key(1);
    bool found = false;
    const auto finds = [&](SaveTimes times) {
        table.contains({&wanted, 1}, times, {&found, 1});
        return found;
    };
    CHECK(finds({.oldest = 7}));
    CHECK(!finds({.oldest = 8}));
    CHECK(finds({.newest = 7}));
    CHECK(!finds({.newest = 6}));  // saved while the clock was ahead
}

TEST(random_operations_agree_with_a_map) {
    std::mt19937 rng(3);
    SlotTable table(64);
    table.grow(64);
    std::map<std::uint32_t, std::int32_t> model;
    for (int step = 0; step < 20000; ++step) {
        const std::uint32_t number = rng() % 200;
        const StoreKey wanted = key(number);
        switch (rng() % 5) {
            case 0:
            case 1: {
                const auto slots = table.reserve(1);
                if (slots.empty()) break;
                for (const auto& [other, slot] : model) CHECK(other == number || slot != slots[0]);
                table.commit({&wanted, 1}, slots, 7);
                model[number] = slots[0];
                break;
            }
            case 2:
                CHECK_EQ(table.remove({&wanted, 1}), model.erase(number));
                break;
            case 3:
                CHECK_EQ(slot_of(table, wanted), model.contains(number) ? model[number] : -1);
                break;
            default:
                table.settle(table.unsettled_total(), 100);
        }
        if (step % 500 == 0) CHECK_EQ(table.check(), "");
        CHECK_EQ(table.stored(), model.size());
    }
}

TEST(a_snapshot_lists_all_keys_while_slots_are_used) {
    std::mt19937 rng(5);
    for (int round = 0; round < 200; ++round) {
        SlotTable table(32);
        table.grow(32);
        std::set<std::uint32_t> kept;
        for (std::uint32_t i = 0; i < 32; ++i) {
            add(table, {key(i)});
            kept.insert(i);
        }
        std::set<std::uint32_t> listed;
        table.begin_snapshot();
        for (auto records = table.snapshot(3); !records.empty(); records = table.snapshot(3)) {
            for (const auto& record : records) {
                std::uint32_t number;
                std::memcpy(&number, record.key.data() + 28, 4);
                listed.insert(number);
            }
            for (int i = 0; i < 2; ++i) slot_of(table, key(rng() % 32));
            const std::uint32_t number = rng() % 32;
            const StoreKey gone = key(number);
            if (rng() % 2 == 0 && table.remove({&gone, 1}) == 1) kept.erase(number);
        }
        for (const std::uint32_t number : kept) CHECK(listed.contains(number));
    }
}

TEST(published_keys_are_found_while_any_table_has_them) {
    const auto hashed = [](std::uint32_t number) {
        StoreKey bytes = key(number);
        std::mt19937_64 rng(number);
        for (std::size_t at = 0; at < 16; at += 8) {
            const std::uint64_t word = rng();
            std::memcpy(bytes.data() + at, &word, sizeof word);
        }
        return bytes;
    };
    std::vector<std::uint8_t> counters(KeyCounts::kCountersPerKey * 1'000);
    const auto found = [&](std::uint32_t begin, std::uint32_t end) {
        std::uint32_t count = 0;
        for (; begin < end; ++begin) count += KeyCounts::may_have(counters, hashed(begin));
        return count;
    };
    {
        SlotTable memory(500), disk(500);
        memory.grow(500);
        disk.grow(500);
        memory.publish(KeyCounts(counters));
        for (std::uint32_t i = 0; i < 500; ++i) add(memory, {hashed(i)});
        for (std::uint32_t i = 0; i < 200; ++i) add(disk, {hashed(i)});
        disk.publish(KeyCounts(counters));  // with the keys that it has
        for (std::uint32_t i = 500; i < 800; ++i) add(disk, {hashed(i)});
        CHECK_EQ(found(0, 800), 800u);
        CHECK(found(1'000, 11'000) < 70);
        CHECK_EQ(memory.evict(500), 500u);
        CHECK_EQ(found(0, 200), 200u);  // the other table has them
        CHECK_EQ(found(500, 800), 300u);
        CHECK(found(200, 500) < 10);
        const StoreKey again = hashed(0);
        auto slot = disk.reserve(1);
        CHECK(slot.empty());
        disk.remove({&again, 1});
        disk.settle(disk.unsettled_total(), 1);
        CHECK_EQ(found(0, 1), 0u);
        add(disk, {again});
        CHECK_EQ(found(0, 200), 200u);
    }
    CHECK(std::ranges::all_of(counters, [](std::uint8_t count) { return count == 0; }));
}

TEST(a_published_key_is_found_while_it_moves_to_other_slots) {
    std::vector<std::uint8_t> counters(KeyCounts::kCountersPerKey * 8);
    SlotTable table(8);
    table.grow(8);
    table.publish(KeyCounts(counters));
    add(table, {key(1)});
    std::atomic<bool> has_ended = false;
    std::jthread mover([&] {
        for (int i = 0; i < 200'000; ++i) {
            add(table, {key(1)});
            table.settle(table.unsettled_total(), 8);
            table.take_records();
        }
        has_ended = true;
    });
    bool found = true;
    while (!has_ended) found = found && KeyCounts::may_have(counters, key(1));
    CHECK(found);
}

TEST(key_counts_that_are_full_miss_no_key) {
    std::vector<std::uint8_t> counters(2);
    const KeyCounts counts{counters};
    for (std::uint32_t i = 0; i < 1'000; ++i) counts.add(key(i));
    for (std::uint32_t i = 1; i < 1'000; ++i) counts.remove(key(i));
    CHECK(KeyCounts::may_have(counters, key(0)));
    counters.assign(2, 0);
    counts.remove(key(0));  // as of counters that another process has written
    CHECK(!KeyCounts::may_have(counters, key(0)));
}

TEST(replay_restores_what_was_written) {
    Replayed result({session(kBoot), added(1, 5), added(2, 6), removed(1, 5), added(3, 5)});
    CHECK_EQ(slot_of(result.table, key(1)), -1);
    CHECK_EQ(slot_of(result.table, key(2)), 6);
    CHECK_EQ(slot_of(result.table, key(3)), 5);
    CHECK_EQ(result.replay.end(), 5u);
    CHECK_EQ(result.table.available(), 5u);  // slots 0 to 4
}

TEST(an_add_supersedes_the_key_of_its_slot_and_the_slot_of_its_key) {
    Replayed result({session(kBoot), added(1, 5), added(2, 5), added(2, 6)});
    CHECK_EQ(slot_of(result.table, key(1)), -1);
    CHECK_EQ(slot_of(result.table, key(2)), 6);
    CHECK_EQ(result.table.stored(), 1u);
}

TEST(adds_of_another_boot_count_only_when_they_are_proven) {
    Replayed result({session(kOtherBoot), added(1, 1), kSyncedRecord, added(2, 2), removed(1, 1)});
    CHECK_EQ(slot_of(result.table, key(1)), -1);
    CHECK_EQ(slot_of(result.table, key(2)), -1);
    CHECK_EQ(result.replay.unproven(), 1u);
    Replayed proven({session(kOtherBoot), added(1, 1), kSyncedRecord, session(kBoot), added(2, 2)});
    CHECK_EQ(proven.table.stored(), 2u);
    Replayed later({session(kOtherBoot), added(1, 1), session(kBoot), added(2, 2), kSyncedRecord});
    CHECK_EQ(slot_of(later.table, key(1)), -1);
    CHECK_EQ(slot_of(later.table, key(2)), 2);
}

TEST(each_flipped_byte_skips_one_record) {
    const std::vector<JournalRecord> records{session(kBoot), added(1, 1), added(2, 2), added(3, 3)};
    for (std::size_t byte = 64; byte < records.size() * 64; ++byte) {
        Replayed result(records, 0, static_cast<int>(byte));
        CHECK_EQ(result.table.stored(), 2u);
        CHECK_EQ(slot_of(result.table, key(static_cast<std::uint32_t>(byte / 64))), -1);
        CHECK_EQ(result.replay.damaged() + result.replay.torn(), 1u);
    }
}

TEST(each_cut_keeps_the_whole_records_before_it) {
    const std::vector<JournalRecord> records{session(kBoot), added(1, 1), added(2, 2)};
    for (std::size_t cut = 0; cut <= 128; ++cut) {
        Replayed result(records, cut);
        CHECK_EQ(result.table.stored(), 2 - (cut + 63) / 64);
        CHECK_EQ(result.replay.end(), 3 - (cut + 63) / 64);
    }
}

TEST(records_of_another_file_or_place_are_invalid) {
    std::vector<JournalRecord> records{session(kBoot), added(1, 1)};
    stamp_records(records, kEpoch, 0);
    CHECK(record_checksum(records[1], kEpoch, 1) == records[1].checksum);
    CHECK(record_checksum(records[1], kEpoch, 2) != records[1].checksum);
    CHECK(record_checksum(records[1], kEpoch + 1, 1) != records[1].checksum);
}

TEST(quarantined_slots_stay_out_of_use) {
    SlotTable table(2);
    table.grow(2);
    add(table, {key(1)});
    const StoreKey wanted = key(1);
    CHECK_EQ(table.quarantine({&wanted, 1}), 1u);
    const auto records = table.take_records();
    CHECK_EQ(records.size(), 1u);
    CHECK(records[0].kind == RecordKind::kQuarantine);
    table.settle(table.unsettled_total(), 100);
    CHECK_EQ(table.available(), 1u);
    Replayed result({session(kBoot), added(1, 0), records[0]});
    CHECK_EQ(result.table.quarantined(), 1u);
    CHECK_EQ(result.table.stored(), 0u);
}
