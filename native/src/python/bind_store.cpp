// The disk store: the table of its slots, and the records of its journal. Keys travel as bytes, one
// behind the other, and slots as int32 arrays.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "aiokv/error.hpp"
#include "aiokv/journal_record.hpp"
#include "aiokv/journal_replay.hpp"
#include "aiokv/reuse_sketch.hpp"
#include "aiokv/slot_table.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using SlotArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewSlots = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>;
using NewFlags = nb::ndarray<nb::numpy, bool, nb::ndim<1>>;
using Buffer = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Counters = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static_assert(alignof(StoreKey) == 1);

std::span<const StoreKey> keys_of(const nb::bytes& keys) {
    if (keys.size() % sizeof(StoreKey) != 0) {
        throw UsageError("keys have " + std::to_string(keys.size()) +
                         " bytes; that must be a multiple of 32");
    }
    return {reinterpret_cast<const StoreKey*>(keys.data()), keys.size() / sizeof(StoreKey)};
}

StoreKey key_of(const nb::bytes& key) {
    if (key.size() != sizeof(StoreKey)) throw UsageError("a key must have 32 bytes");
    return keys_of(key)[0];
}

std::span<const std::int32_t> slots_of(const SlotArray& slots) {
    return {slots.data(), slots.size()};
}

template <class Array, class T>
Array array_of(std::unique_ptr<T[]> data, std::size_t size) {
    T* pointer = data.release();
    nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Array(pointer, {size}, owner);
}

NewSlots new_slots(const std::vector<std::int32_t>& slots) {
    auto data = std::make_unique<std::int32_t[]>(slots.size() + 1);
    std::copy(slots.begin(), slots.end(), data.get());
    return array_of<NewSlots>(std::move(data), slots.size());
}

NewSlots count_offers(ReuseSketch& sketch, const nb::bytes& keys) {
    std::vector<std::int32_t> counts;
    for (const StoreKey& key : keys_of(keys)) {
        counts.push_back(static_cast<std::int32_t>(sketch.count(key)));
    }
    return new_slots(counts);
}

nb::bytes record_bytes(const std::vector<JournalRecord>& records) {
    return nb::bytes(records.data(), records.size() * sizeof(JournalRecord));
}

void check_batch(const nb::bytes& keys, const SlotArray& slots) {
    if (keys_of(keys).size() == slots.size()) return;
    throw UsageError(std::to_string(keys_of(keys).size()) + " keys for " +
                     std::to_string(slots.size()) + " slots");
}

NewFlags contains(SlotTable& table, const nb::bytes& keys, std::uint32_t oldest,
                  std::uint32_t newest) {
    const auto batch = keys_of(keys);
    auto found = std::make_unique<bool[]>(batch.size() + 1);
    table.contains(batch, {oldest, newest}, {found.get(), batch.size()});
    return array_of<NewFlags>(std::move(found), batch.size());
}

NewSlots pin(SlotTable& table, const nb::bytes& keys, std::uint32_t oldest, std::uint32_t newest) {
    const auto batch = keys_of(keys);
    auto slots = std::make_unique<std::int32_t[]>(batch.size() + 1);
    table.pin(batch, {oldest, newest}, {slots.get(), batch.size()});
    return array_of<NewSlots>(std::move(slots), batch.size());
}

// Records without checksums: stamp_records() adds them when their place in the file is known.
nb::bytes add_records(const nb::bytes& keys, const SlotArray& slots, std::uint32_t seconds) {
    check_batch(keys, slots);
    const auto batch = keys_of(keys);
    std::vector<JournalRecord> records;
    for (std::size_t i = 0; i < batch.size(); ++i) {
        records.push_back({.kind = RecordKind::kAdd,
                           .slot = static_cast<std::uint32_t>(slots.data()[i]),
                           .key = batch[i],
                           .seconds = seconds});
    }
    return record_bytes(records);
}

nb::bytes stamped(const nb::bytes& raw, std::uint64_t epoch, std::uint64_t position) {
    std::vector<JournalRecord> records(raw.size() / sizeof(JournalRecord));
    std::copy_n(static_cast<const std::uint8_t*>(raw.data()),
                records.size() * sizeof(JournalRecord),
                reinterpret_cast<std::uint8_t*>(records.data()));
    stamp_records(records, epoch, position);
    return record_bytes(records);
}

bool may_have_any(const Buffer& counters, const nb::bytes& keys) {
    if (counters.size() == 0) throw UsageError("may_have_any: counters is empty");
    const std::span<const std::uint8_t> counts(counters.data(), counters.size());
    return std::ranges::any_of(
        keys_of(keys), [&](const StoreKey& key) { return KeyCounts::may_have(counts, key); });
}

void bind_table(nb::module_& m) {
    nb::class_<SlotTable>(m, "SlotTable",
                          "Slots of a disk store: keys, free slots and recency. Not thread-safe.")
        .def(nb::init<std::size_t>(), "capacity"_a)
        .def("contains", &contains, "keys"_a, "oldest"_a = 0, "newest"_a = SaveTimes{}.newest,
             "Return for each key whether it is stored, and was saved from `oldest` to `newest` "
             "(Unix times, inclusive).")
        .def("pin", &pin, "keys"_a, "oldest"_a = 0, "newest"_a = SaveTimes{}.newest,
             "Return the slot of each key, or -1. Until unpin(), the slots found are not reused.")
        .def(
            "unpin", [](SlotTable& table, const SlotArray& slots) { table.unpin(slots_of(slots)); },
            "slots"_a, "Undo pin() for these slots.")
        .def(
            "reserve",
            [](SlotTable& table, std::size_t count) { return new_slots(table.reserve(count)); },
            "count"_a, "Take up to `count` free slots, in rising order.")
        .def(
            "release",
            [](SlotTable& table, const SlotArray& slots) { table.release(slots_of(slots)); },
            "slots"_a, "Give back reserved slots about which no record was written.")
        .def(
            "commit",
            [](SlotTable& table, const nb::bytes& keys, const SlotArray& slots,
               std::uint32_t seconds) {
                check_batch(keys, slots);
                table.commit(keys_of(keys), slots_of(slots), seconds);
            },
            "keys"_a, "slots"_a, "seconds"_a,
            "Let the keys be found; their data and records are written.")
        .def(
            "discard",
            [](SlotTable& table, const nb::bytes& keys, const SlotArray& slots) {
                check_batch(keys, slots);
                table.discard(keys_of(keys), slots_of(slots));
            },
            "keys"_a, "slots"_a, "Give back reserved slots whose records may have been written.")
        .def("grow", &SlotTable::grow, "count"_a, "Let reserve() use `count` more slots.")
        .def(
            "remove",
            [](SlotTable& table, const nb::bytes& keys) { return table.remove(keys_of(keys)); },
            "keys"_a, "Remove the keys that are stored; return their number.")
        .def(
            "quarantine",
            [](SlotTable& table, const nb::bytes& keys) { return table.quarantine(keys_of(keys)); },
            "keys"_a, "Remove the keys that are stored and never reuse their slots.")
        .def("evict", &SlotTable::evict, "count"_a,
             "Remove the least recently used keys that are not pinned; return their number.")
        .def(
            "take_records", [](SlotTable& table) { return record_bytes(table.take_records()); },
            "Return the records of removals since the last call, without checksums.")
        .def("settle", &SlotTable::settle, "total"_a, "count"_a,
             "Free up to `count` of the slots that were unsettled when `unsettled_total` had this "
             "value; return True when none of them is left.")
        .def_prop_ro("unsettled_total", &SlotTable::unsettled_total)
        .def("begin_snapshot", &SlotTable::begin_snapshot)
        .def(
            "snapshot",
            [](SlotTable& table, std::size_t count) { return record_bytes(table.snapshot(count)); },
            "count"_a, "Return the next records of the snapshot, b\"\" at its end.")
        .def(
            "list_keys",
            [](const SlotTable& table, std::size_t first, std::size_t count,
               const nb::bytes& label) {
                const std::span<const std::uint8_t> bytes(
                    static_cast<const std::uint8_t*>(label.data()), label.size());
                if (bytes.size() > sizeof(StoreKey)) throw UsageError("label is longer than a key");
                std::vector<StoreKey> keys;
                table.list_keys(first, count, bytes, keys);
                return nb::bytes(keys.data(), keys.size() * sizeof(StoreKey));
            },
            "first"_a, "count"_a, "label"_a,
            "Return the keys of `count` slots from `first` on that end with `label`.")
        .def(
            "newest",
            [](const SlotTable& table, std::size_t count) {
                const std::vector<StoreKey> keys = table.newest(count);
                return nb::bytes(keys.data(), keys.size() * sizeof(StoreKey));
            },
            "count"_a, "Return the `count` most recently used keys, the last one used first.")
        .def(
            "label_counts",
            [](const SlotTable& table, std::size_t count) {
                nb::dict kinds;
                for (std::size_t i = 0; i < LabelCounts::kPlaces.size(); ++i) {
                    const LabelCounts::Place& place = LabelCounts::kPlaces[i];
                    nb::dict labels;
                    for (const auto& [number, keys] : table.labels().largest(i, count)) {
                        std::array<std::uint8_t, 8> bytes{};
                        for (std::size_t at = 0; at < place.bytes; ++at) {
                            bytes[at] = static_cast<std::uint8_t>(
                                number >> 8 * (place.bytes - 1 - at) & 0xff);
                        }
                        labels[nb::bytes(bytes.data(), place.bytes)] = keys;
                    }
                    kinds[place.kind] = labels;
                }
                return kinds;
            },
            "count"_a, nb::sig("def label_counts(self, count: int) -> dict[str, dict[bytes, int]]"),
            "Return the numbers of keys by label, of the `count` largest labels of each kind.")
        .def(
            "publish",
            [](SlotTable& table, const Counters& counters) {
                const KeyCounts counts({counters.data(), counters.size()});
                nb::gil_scoped_release released;
                table.publish(counts);
            },
            "counters"_a, nb::keep_alive<1, 2>(),
            "Count the stored keys in `counters`, which several tables may share, until the table "
            "is destroyed; see may_have_any(). Call once.")
        .def_prop_ro("high_water", &SlotTable::high_water, "Slots that were ever reserved.")
        .def_prop_ro("capacity", &SlotTable::capacity)
        .def_prop_ro("limit", &SlotTable::limit, "Slots that exist on the medium.")
        .def_prop_ro("stored", &SlotTable::stored)
        .def_prop_ro("available", &SlotTable::available, "Slots that reserve() can take.")
        .def_prop_ro("unsettled", &SlotTable::unsettled)
        .def_prop_ro("quarantined", &SlotTable::quarantined)
        .def_prop_ro("num_bytes", &SlotTable::bytes, "Memory in use.")
        .def("check", &SlotTable::check, "Return the first violated invariant, or \"\".");
}

void bind_replay(nb::module_& m) {
    nb::class_<JournalReplay>(m, "JournalReplay", "Rebuilds a slot table from a journal.")
        .def(
            "__init__",
            [](JournalReplay* self, SlotTable& table, std::uint64_t epoch, const nb::bytes& boot,
               std::size_t num_slots) {
                new (self) JournalReplay(table, epoch, key_of(boot), num_slots);
            },
            "table"_a, "epoch"_a, "boot"_a, "num_slots"_a, nb::keep_alive<1, 2>())
        .def(
            "feed",
            [](JournalReplay& replay, const Buffer& bytes) {
                const std::span<const std::uint8_t> view(bytes.data(), bytes.size());
                nb::gil_scoped_release released;
                replay.feed(view);
            },
            "bytes"_a, "Read the next bytes: whole records, except at the end of the file.")
        .def("finish", &JournalReplay::finish, nb::call_guard<nb::gil_scoped_release>(),
             "Apply the records that are proven; slots without a key become free.")
        .def_prop_ro("end", &JournalReplay::end, "Position behind the last valid record.")
        .def_prop_ro("damaged", &JournalReplay::damaged, "Invalid records before `end`.")
        .def_prop_ro("torn", &JournalReplay::torn, "Invalid records behind `end`.")
        .def_prop_ro("unproven", &JournalReplay::unproven,
                     "Adds that were dropped: a power cut may have lost their data.")
        .def_prop_ro("outside", &JournalReplay::outside,
                     "Records of slots above the capacity, or from num_slots on.");
}

}  // namespace

void bind_store(nb::module_& m) {
    bind_table(m);
    m.attr("KEY_COUNTERS_PER_KEY") = KeyCounts::kCountersPerKey;
    m.def("may_have_any", &may_have_any, "counters"_a, "keys"_a,
          "Return False if no table that has published its keys in `counters` has any of these.");
    bind_replay(m);
    nb::class_<ReuseSketch>(m, "ReuseSketch", "Approximate number of recent offers of each key.")
        .def(nb::init<std::uint64_t, std::uint32_t>(), "period"_a, "most"_a)
        .def("count", &count_offers, "keys"_a,
             "Count an offer of each key; return the number of its earlier offers, up to `most`, "
             "[N] int32.")
        .def(
            "counters",
            [](const ReuseSketch& sketch) {
                return nb::bytes(sketch.counters().data(), sketch.bytes());
            },
            "Return the state, for restore().")
        .def(
            "restore",
            [](ReuseSketch& sketch, const nb::bytes& counters) {
                sketch.restore(
                    {static_cast<const std::uint8_t*>(counters.data()), counters.size()});
            },
            "counters"_a, "Replace the state by that of a sketch of the same size.");
    m.def("add_records", &add_records, "keys"_a, "slots"_a, "seconds"_a,
          "Return records that add the keys, without checksums.");
    m.def(
        "synced_record", [] { return record_bytes({{.kind = RecordKind::kSynced}}); },
        "Return the record that proves the adds before it, without checksum.");
    m.def(
        "session_record",
        [](const nb::bytes& boot) {
            return record_bytes({{.kind = RecordKind::kSession, .key = key_of(boot)}});
        },
        "boot"_a, "Return the record that begins a session, without checksum.");
    m.def("stamp_records", &stamped, "records"_a, "epoch"_a, "position"_a,
          "Return the records with checksums for their place in the journal.");
}

}  // namespace aiokv
