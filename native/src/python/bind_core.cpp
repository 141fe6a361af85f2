// The scheduler's core. Ids travel as int32 bytes or arrays, one call a request.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "aiokv/tick_clock.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using TokenArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LeaseIdArray = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ItemTuple = std::tuple<nb::bytes, std::int64_t, std::int64_t>;

}  // namespace
}  // namespace aiokv

namespace nanobind::detail {

// An argument that is a view of a Python object, or of its conversion: valid in the call.
template <class View, class Held>
struct ViewOf {
    NB_TYPE_CASTER(View, make_caster<Held>::Name)
    bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        if (!held_.from_python(src, flags, cleanup)) return false;
        value = {static_cast<typename View::pointer>(held_.value.data()), held_.value.size()};
        return true;
    }

  private:
    make_caster<Held> held_;
};

// An array is not copied. A list or a tuple has exact integers only.
template <class View, class Array>
struct IntegersOf {
    using Integer = std::remove_cv_t<typename View::element_type>;
    NB_TYPE_CASTER(View,
                   union_name(make_caster<std::vector<Integer>>::Name, make_caster<Array>::Name))
    bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        if (PyList_Check(src.ptr()) || PyTuple_Check(src.ptr())) {
            const auto exact = flags & ~static_cast<std::uint32_t>(cast_flags::convert);
            if (!list_.from_python(src, static_cast<std::uint8_t>(exact), cleanup)) return false;
            value = list_.value;
            return true;
        }
        if (!array_.from_python(src, flags, cleanup)) return false;
        value = {reinterpret_cast<const Integer*>(array_.value.data()), array_.value.size()};
        return true;
    }

  private:
    make_caster<std::vector<Integer>> list_;
    make_caster<Array> array_;
};

template <>
struct type_caster<aiokv::Tokens> : IntegersOf<aiokv::Tokens, aiokv::TokenArray> {};
template <>
struct type_caster<std::span<const aiokv::LeaseId>>
    : IntegersOf<std::span<const aiokv::LeaseId>, aiokv::LeaseIdArray> {};
template <>
struct type_caster<std::span<const std::uint8_t>> : ViewOf<std::span<const std::uint8_t>, bytes> {};

template <>
struct type_caster<std::span<const aiokv::Item>> {
    NB_TYPE_CASTER(std::span<const aiokv::Item>, make_caster<std::vector<aiokv::ItemTuple>>::Name)
    bool from_python(handle src, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        if (!tuples_.from_python(src, flags, cleanup)) return false;
        for (const auto& [hash, offset, length] : tuples_.value) {
            items_.push_back({{hash.c_str(), hash.size()}, offset, length});
        }
        value = items_;
        return true;
    }

  private:
    make_caster<std::vector<aiokv::ItemTuple>> tuples_;
    std::vector<aiokv::Item> items_;
};

// A result that Python gets as a tuple of these fields.
template <class Struct, auto... Fields>
struct TupleOf {
    using Tuple =
        std::tuple<std::remove_cvref_t<decltype(std::declval<const Struct&>().*Fields)>...>;
    NB_TYPE_CASTER(Struct, make_caster<Tuple>::Name)
    static handle from_cpp(const Struct& result, rv_policy policy, cleanup_list* list) noexcept {
        return make_caster<Tuple>::from_cpp(Tuple(result.*Fields...), policy, list);
    }
};

template <>
struct type_caster<aiokv::Hit> : TupleOf<aiokv::Hit, &aiokv::Hit::lease, &aiokv::Hit::device_blocks,
                                         &aiokv::Hit::host_blocks> {};
template <>
struct type_caster<aiokv::Pending>
    : TupleOf<aiokv::Pending, &aiokv::Pending::owner, &aiokv::Pending::blocks> {};
template <>
struct type_caster<aiokv::Room> : TupleOf<aiokv::Room, &aiokv::Room::device_free,
                                          &aiokv::Room::evictable, &aiokv::Room::state_slots> {};
template <>
struct type_caster<aiokv::Usage>
    : TupleOf<aiokv::Usage, &aiokv::Usage::prompt_tokens, &aiokv::Usage::cached_device_tokens,
              &aiokv::Usage::cached_host_tokens, &aiokv::Usage::computed_blocks> {};
template <>
struct type_caster<aiokv::StateCopy>
    : TupleOf<aiokv::StateCopy, &aiokv::StateCopy::source, &aiokv::StateCopy::target> {};
template <>
struct type_caster<aiokv::PeerEnd>
    : TupleOf<aiokv::PeerEnd, &aiokv::PeerEnd::transfer, &aiokv::PeerEnd::lease,
              &aiokv::PeerEnd::blocks, &aiokv::PeerEnd::commits> {};
}  // namespace nanobind::detail

namespace aiokv {
namespace {

using TableArray = nb::ndarray<std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MutableTokenArray = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>>;

IdArray copy_ids(const std::vector<BlockId>& ids) {
    auto* data = new BlockId[ids.size() + 1];
    std::copy(ids.begin(), ids.end(), data);
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<BlockId*>(p); });
    return IdArray(data, {ids.size()}, owner);
}

nb::bytes id_bytes(const std::vector<BlockId>& ids) {
    return nb::bytes(ids.data(), ids.size() * sizeof(BlockId));
}

using HitTuple = nb::typed<nb::tuple, std::uint32_t, std::uint32_t>;
using MissingTuple = nb::typed<nb::tuple, std::size_t, nb::bytes>;
using BoundariesTuple =
    nb::typed<nb::tuple, std::size_t, std::size_t, std::size_t, nb::bytes, nb::bytes>;
using StoreTransferTuple = nb::typed<nb::tuple, GroupId, nb::bytes, nb::bytes, nb::bytes>;
// (device_blocks, window_tokens, step_tokens, sink_tokens, host_blocks)
using WindowTuple =
    std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using ForkTuple = nb::typed<nb::tuple, LeaseId, IdArray, IdArray>;
using MoveTuple = nb::typed<nb::tuple, MoveRoute, GroupId, nb::bytes, nb::bytes, Step>;
using TransferTuple = nb::typed<nb::tuple, nb::bytes, nb::bytes, Step>;
using PeerTransferTuple = nb::typed<nb::tuple, bool, nb::bytes, GroupId, nb::bytes, nb::bytes, Step,
                                    std::tuple<std::uint32_t, std::uint32_t>, std::uint64_t>;

HitTuple would_hit(const Core& core, Tokens tokens, std::span<const Item> items,
                   std::string_view context) {
    const Hit hit = core.would_hit(tokens, context, items);
    return nb::make_tuple(hit.device_blocks, hit.host_blocks);
}

TransferTuple transfer(const Core& core, TransferId id) {
    const Transfer& t = core.transfer(id);
    return nb::make_tuple(id_bytes(t.device_blocks), id_bytes(t.host_blocks), t.after_step);
}

nb::bytes digest_bytes(std::span<const Digest> digests) {
    return nb::bytes(digests.data(), digests.size_bytes());
}

nb::bytes byte_flags(std::span<const std::uint8_t> flags) {
    return nb::bytes(flags.data(), flags.size());
}

MissingTuple missing(Core& core, LeaseId id, std::size_t blocks) {
    const Missing found = core.missing(id, blocks);
    return nb::make_tuple(found.first_block, digest_bytes(found.digests));
}

BoundariesTuple boundaries(Core& core, LeaseId id, std::size_t skip) {
    const Boundaries found = core.boundaries(id, skip);
    return nb::make_tuple(found.hit, found.cached, found.first_block, digest_bytes(found.digests),
                          byte_flags(found.may_end));
}

// A fetch or a save.
StoreTransferTuple store_transfer(const Core& core, TransferId id) {
    const StoreTransfer& transfer = core.store_transfer(id);
    return nb::make_tuple(core.group_of(id), id_bytes(transfer.host_blocks),
                          digest_bytes(transfer.digests), byte_flags(transfer.follows));
}

TicketId ticket_id(const nb::bytes& bytes) {
    TicketId id{};
    if (bytes.size() != id.size()) {
        throw UsageError("ticket_id has " + std::to_string(bytes.size()) + " bytes; it must have " +
                         std::to_string(id.size()));
    }
    const auto* data = static_cast<const std::uint8_t*>(bytes.data());
    std::copy(data, data + id.size(), id.begin());
    return id;
}

PeerTransferTuple peer_transfer(const Core& core, TransferId id) {
    const PeerTransfer& t = core.peer_transfer(id);
    return nb::make_tuple(t.receives, nb::bytes(t.ticket.data(), t.ticket.size()), t.group,
                          id_bytes({t.blocks.begin(), t.blocks.end()}), id_bytes(t.ids),
                          t.after_step, nb::make_tuple(t.layers.first, t.layers.end), t.mark);
}

// A method of Core whose second argument is a ticket.
template <class Result, class... Args>
auto with_ticket(Result (Core::*method)(LeaseId, const TicketId&, Args...)) {
    return [method](Core& core, LeaseId id, const nb::bytes& ticket, Args... args) {
        return (core.*method)(id, ticket_id(ticket), args...);
    };
}

using AdvancedTuple = nb::typed<nb::tuple, std::uint32_t, std::vector<std::uint32_t>,
                                std::vector<std::uint32_t>, IdArray>;

AdvancedTuple advance(Core& core, std::span<const LeaseId> ids, Tokens tokens, std::size_t width,
                      std::optional<Tokens> counts, std::int64_t draft_tokens, Step step) {
    const StepTokens step_tokens{tokens, width, counts.value_or(Tokens())};
    const Advanced advanced = core.advance(ids, step_tokens, draft_tokens, step);
    return nb::make_tuple(advanced.published, advanced.refused, advanced.grown,
                          copy_ids(advanced.computed));
}

using SettledTuple =
    nb::typed<nb::tuple, std::vector<LeaseId>, std::vector<LeaseId>, std::vector<LeaseId>>;

std::optional<SettledTuple> settle(Core& core) {
    const Core::Settled settled = core.settle();
    if (settled.empty()) return std::nullopt;
    return nb::make_tuple(settled.ended, settled.advanced, settled.idle);
}

// A field of an open lease.
template <class Field>
auto of_lease(Field Lease::* field) {
    return [field](const Core& core, LeaseId id) -> Field { return core.lease(id).*field; };
}

HitTuple group_hit(const Core& core, LeaseId id, GroupId group) {
    const GroupHit hit = core.group_hit(id, group);
    return nb::make_tuple(hit.device_blocks, hit.host_blocks);
}

HitTuple rematch(Core& core, LeaseId id) {
    const Core::CachedPart part = core.rematch(id);
    return nb::make_tuple(part.cached_tokens, part.prompt_tokens);
}

HitTuple hit(const Core& core, LeaseId id) {
    const Lease& lease = core.lease(id);
    return nb::make_tuple(lease.device_hit, lease.host_hit);
}

using BlockTuple =
    nb::typed<nb::tuple, std::string, nb::bytes, BlockId, BlockId, int, std::uint32_t, int>;

std::vector<BlockTuple> blocks(const Core& core) {
    constexpr std::uint32_t kCopies = kDeviceResident | kHostValid | kHostLoading;
    std::vector<BlockTuple> tuples;
    for (const BlockView& view : core.blocks()) {
        const Node& n = *view.node;
        tuples.push_back(nb::make_tuple(view.context, id_bytes(view.prefix), n.device, n.host,
                                        static_cast<int>(n.flags & kCopies), view.refs,
                                        static_cast<int>(n.pins)));
    }
    return tuples;
}

using HotPrefixTuple =
    nb::typed<nb::tuple, std::int64_t, std::uint32_t, std::string, std::uint32_t, std::uint32_t,
              std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using HotPrefixesTuple = nb::typed<nb::tuple, std::vector<HotPrefixTuple>, bool>;

HotPrefixesTuple hot_prefix_tuples(const Core& core, std::size_t limit) {
    const HotPrefixes found = core.hottest_prefixes(limit);
    std::vector<HotPrefixTuple> tuples;
    for (const HotPrefix& p : found.prefixes) {
        const auto parent =
            p.parent == HotPrefix::kNoParent ? -1 : static_cast<std::int64_t>(p.parent);
        tuples.push_back(nb::make_tuple(parent, p.node, std::string(p.context), p.first_block,
                                        p.blocks, p.device_blocks, p.host_blocks, p.uses, p.refs,
                                        p.children));
    }
    return nb::make_tuple(tuples, found.complete);
}

using MissTuple =
    nb::typed<nb::tuple, std::uint32_t, std::uint32_t, std::string, std::optional<double>,
              std::string, bool, std::uint64_t, std::optional<std::string>,
              std::optional<nb::typed<nb::tuple, std::uint32_t, std::int32_t, std::int32_t>>>;

const char* name_of(MissCause cause) {
    constexpr std::array<const char*, kMissCauses> names = {
        "never_seen",  "diverged", "evicted",  "other_weights", "other_context",
        "other_items", "pending",  "in_store", "unusable"};
    return names[static_cast<std::size_t>(cause)];
}

constexpr std::array<const char*, 3> kStoreMisses = {"declined", "late", "failed"};

void note_left_in_store(Core& core, LeaseId id, std::uint32_t blocks, std::string_view why) {
    const auto at = std::find(kStoreMisses.begin(), kStoreMisses.end(), why);
    if (at == kStoreMisses.end())
        throw std::invalid_argument("unknown reason: " + std::string(why));
    core.note_left_in_store(id, blocks, static_cast<StoreMiss>(at - kStoreMisses.begin()));
}

std::vector<MissTuple> miss_tuples(const Core& core, LeaseId id) {
    std::vector<MissTuple> tuples;
    for (const MissedRun& run : core.missed(id)) {
        const bool evicted = run.cause == MissCause::kEvicted;
        nb::object seconds = nb::none();
        nb::object context = nb::none();
        nb::object divergence = nb::none();
        if (evicted) {
            const std::uint64_t ns = tick_nanoseconds() - run.eviction.at_ns;
            seconds = nb::float_(static_cast<double>(ns) / 1e9);
        }
        if (run.cause == MissCause::kOtherContext) context = nb::cast(core.context_of(run));
        if (run.cause == MissCause::kDiverged) {
            if (const auto found = core.divergence(id, run)) {
                divergence = nb::make_tuple(found->position, found->token, found->known_token);
            }
        }
        const char* reason = evicted ? name_of(run.eviction.cause) : "";
        if (run.cause == MissCause::kInStore) {
            reason = kStoreMisses[static_cast<std::size_t>(run.left)];
        }
        tuples.push_back(nb::make_tuple(
            run.first, run.end, name_of(run.cause), seconds, reason, run.eviction.from_host,
            evicted ? run.eviction.demand : run.owner, context, divergence));
    }
    return tuples;
}

CountByName missed_by_cause(const MissCounts& counts) {
    CountByName named;
    for (std::size_t i = 0; i < kMissCauses; ++i) {
        named[name_of(static_cast<MissCause>(i))] = counts[i];
    }
    return named;
}

using LeaseTuple = nb::typed<nb::tuple, LeaseId, double, std::uint32_t, std::uint32_t,
                             std::uint32_t, std::uint32_t, std::size_t>;

LeaseTuple lease_tuple(const Lease& lease, std::uint32_t block_tokens) {
    const std::uint32_t hit = (lease.device_hit + lease.host_hit) * block_tokens;
    return nb::make_tuple(lease.id(), LeaseTable::age_seconds(lease), lease.prompt_tokens,
                          lease.has_blocks() ? lease.cached_tokens : hit, lease.num_tokens,
                          lease.computed_tokens, lease.table.size());
}

// Writes the leading integers of a list or an array to `out`. Returns how many of them, from the
// first on, are of the type int and fit in 32 bits.
std::size_t copy_ints(const nb::typed<nb::list, nb::object>& list, MutableTokenArray out) {
    std::int32_t* target = out.data();
    const std::size_t count = std::min(list.size(), out.size());
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* item = NB_LIST_GET_ITEM(list.ptr(), i);
        if (!PyLong_CheckExact(item)) return i;
        int overflow = 0;
        const long value = PyLong_AsLongAndOverflow(item, &overflow);
        const auto narrow = static_cast<std::int32_t>(value);
        if (overflow != 0 || narrow != value) return i;
        target[i] = narrow;
    }
    return count;
}

std::size_t copy_int64s(const LeaseIdArray& array, MutableTokenArray out) {
    const std::span<const std::int64_t> values(array.data(), std::min(array.size(), out.size()));
    std::int64_t wrong = 0;  // without a branch per element, the loop is vectorized
    for (std::size_t i = 0; i < values.size(); ++i) {
        out.data()[i] = static_cast<std::int32_t>(values[i]);
        wrong |= values[i] ^ out.data()[i];
    }
    if (wrong == 0) return values.size();
    const auto first = std::find_if(values.begin(), values.end(), [](std::int64_t value) {
        return value != static_cast<std::int32_t>(value);
    });
    return static_cast<std::size_t>(first - values.begin());
}

void bind_statistics(nb::module_& m) {
    using T = TierCounts;
    nb::class_<T>(m, "TierCounts", "Blocks, or states, of a block group in one tier.")
        .def_ro("blocks", &T::blocks)
        .def_ro("free", &T::free)
        .def_ro("cached", &T::cached)
        .def_ro("leased", &T::leased)
        .def_ro("in_flight", &T::in_flight)
        .def_ro("evicted_by_cause", &T::evicted_by_cause)
        .def_prop_ro("evicted_blocks", &T::evicted_blocks);
    using G = GroupStatistics;
    nb::class_<G>(m, "GroupStatistics", "Blocks, or states, of a block group.")
        .def_ro("device", &G::device)
        .def_ro("host", &G::host)
        .def_ro("set_aside_blocks", &G::set_aside_blocks)
        .def_ro("cloned", &G::cloned, "Copies on the device that leases began with.")
        .def_ro("onloaded_blocks", &G::onloaded_blocks)
        .def_ro("offloaded_blocks", &G::offloaded_blocks)
        .def_ro("fetched_blocks", &G::fetched_blocks)
        .def_ro("unfetched_blocks", &G::unfetched_blocks)
        .def_ro("saved_blocks", &G::saved_blocks)
        .def_ro("unsaved_by_cause", &G::unsaved_by_cause)
        .def_ro("received_blocks", &G::received_blocks)
        .def_ro("sent_blocks", &G::sent_blocks);
    using S = CoreStatistics;
    nb::class_<S>(m, "CoreStatistics")
        .def_ro("attention", &S::attention)
        .def_prop_ro("missed_tokens_by_cause",
                     [](const S& s) { return missed_by_cause(s.missed_tokens); })
        .def_ro("evictable_blocks", &S::evictable_blocks)
        .def_ro("leases", &S::leases)
        .def_ro("releasing_leases", &S::releasing_leases)
        .def_ro("nodes", &S::nodes)
        .def_ro("hit_device_tokens", &S::hit_device_tokens)
        .def_ro("hit_host_tokens", &S::hit_host_tokens)
        .def_ro("prompt_tokens", &S::prompt_tokens)
        .def_ro("grants", &S::grants)
        .def_ro("computed_tokens", &S::computed_tokens)
        .def_ro("computed_prompt_tokens", &S::computed_prompt_tokens)
        .def_ro("dropped_by_cause", &S::dropped_by_cause)
        .def_ro("published_blocks", &S::published_blocks)
        .def_ro("failed_blocks", &S::failed_blocks)
        .def_ro("skipped_backups", &S::skipped_backups)
        .def_ro("reclaimed_host_copies", &S::reclaimed_host_copies)
        .def_ro("hit_store_tokens", &S::hit_store_tokens)
        .def_ro("fetches", &S::fetches)
        .def_ro("receives", &S::receives)
        .def_ro("failed_receives", &S::failed_receives)
        .def_ro("sends", &S::sends)
        .def_ro("failed_sends", &S::failed_sends)
        .def_ro("index_bytes", &S::index_bytes)
        .def_ro("token_bytes", &S::token_bytes);
}

}  // namespace

void bind_core(nb::module_& m) {
    bind_statistics(m);
    m.attr("ATTENTION_GROUP") = kAttention;
    m.attr("STATE_GROUP") = kRecurrentState;
    m.def("copy_ints", &copy_ints, "list"_a, "out"_a.noconvert(),
          "Write the integers of a list or an array to `out`; return how many of them, from the "
          "first on, are ints of 32 bits.");
    m.def("copy_ints", &copy_int64s, "array"_a.noconvert(), "out"_a.noconvert());
    nb::enum_<Outcome>(m, "Outcome")
        .value("DONE", Outcome::kDone)
        .value("FAILED", Outcome::kFailed)
        .value("CANCELLED", Outcome::kCancelled);
    nb::enum_<SavePolicy>(m, "SavePolicy")
        .value("NONE", SavePolicy::kNone)
        .value("WRITE_THROUGH", SavePolicy::kWriteThrough)
        .value("NTH_USE", SavePolicy::kNthUse)
        .value("WRITE_BACK", SavePolicy::kWriteBack);
    nb::class_<StoreConfig>(m, "StoreConfig", "Rule of when host blocks are saved to the stores.")
        .def(
            "__init__",
            [](StoreConfig* self, SavePolicy policy, std::uint32_t uses, std::uint32_t queue_blocks,
               std::uint32_t ahead_blocks) {
                new (self) StoreConfig{true, policy, uses, queue_blocks, ahead_blocks};
            },
            nb::kw_only(), "policy"_a = SavePolicy::kWriteThrough, "uses"_a = 2,
            "queue_blocks"_a = 4096, "ahead_blocks"_a = 0);
    nb::enum_<MoveRoute>(m, "MoveRoute")
        .value("ON_DEVICE", MoveRoute::kOnDevice)
        .value("FROM_HOST", MoveRoute::kFromHost)
        .value("TO_HOST", MoveRoute::kToHost);
    m.def(
        "eviction_policies",
        [] { return std::vector(eviction_policies().begin(), eviction_policies().end()); },
        "Names of all eviction policies.");
    nb::enum_<LeaseState>(m, "LeaseState")
        .value("MATCHED", LeaseState::kMatched, "Holds nothing.")
        .value("GRANTED", LeaseState::kGranted, "Has refs on its hit, and device blocks.")
        .value("FAILED", LeaseState::kFailed,
               "Like GRANTED; an onload failed, and recompute_from was not called yet.")
        .value("SWAPPING", LeaseState::kSwapping,
               "Like GRANTED; a transfer copies the table to host memory.")
        .value("SWAPPED", LeaseState::kSwapped, "Holds host copies; allocate resumes it.")
        .value("RELEASING", LeaseState::kReleasing,
               "Has no handle; batches or transfers of peers in flight keep its blocks.");
    nb::class_<Core>(m, "Core", "Prefix index, block pools, leases and eviction; not thread-safe.")
        .def(
            "__init__",
            [](Core* self, std::uint32_t block_tokens, std::uint32_t device_blocks,
               std::uint32_t host_blocks, std::uint32_t leave_tokens, std::uint32_t reserve_blocks,
               SavePolicy write_policy, std::uint32_t write_uses,
               std::uint32_t low_watermark_blocks, std::uint32_t min_onload_blocks,
               std::string eviction, std::uint32_t state_slots,
               const std::vector<WindowTuple>& windows, std::uint32_t max_leases,
               const StoreConfig* stores, std::uint32_t host_state_slots, bool external_device,
               bool splits_items, const std::map<std::string, double>& shares,
               std::uint32_t history_blocks) {
                std::vector<WindowConfig> groups;
                for (const auto& [blocks, window, step, sink, host] : windows)
                    groups.push_back({blocks, window, step, sink, host});
                std::vector<std::string> salts;
                std::vector<double> parts;
                for (const auto& [salt, share] : shares) {
                    salts.push_back(salt);
                    parts.push_back(share);
                }
                new (self)
                    Core(CoreConfig{block_tokens,      device_blocks,
                                    host_blocks,       leave_tokens,
                                    reserve_blocks,    write_policy,
                                    write_uses,        low_watermark_blocks,
                                    min_onload_blocks, std::move(eviction),
                                    state_slots,       std::move(groups),
                                    max_leases,        stores != nullptr ? *stores : StoreConfig{},
                                    host_state_slots,  external_device,
                                    splits_items,      std::move(salts),
                                    std::move(parts),  history_blocks});
            },
            nb::kw_only(), "block_tokens"_a, "device_blocks"_a, "host_blocks"_a = 0,
            "leave_tokens"_a = 1, "reserve_blocks"_a = 0, "write_policy"_a = SavePolicy::kNone,
            "write_uses"_a = 2, "low_watermark_blocks"_a = 0, "min_onload_blocks"_a = 0,
            "eviction"_a = "lru", "state_slots"_a = 0, "windows"_a = std::vector<WindowTuple>(),
            "max_leases"_a = kMaxLeases, "stores"_a.none() = nb::none(), "host_state_slots"_a = 0,
            "external_device"_a = false, "splits_items"_a = false,
            "shares"_a = std::map<std::string, double>(), "history_blocks"_a = 0)
        .def(
            "match",
            [](Core& core, Tokens tokens, std::string_view context, bool reads, bool writes) {
                return core.match(tokens, context, reads, writes);
            },
            "tokens"_a, "context"_a = "", "reads"_a = true, "writes"_a = true,
            "Open a lease: (lease, device_blocks, host_blocks) of the longest cached prefix.")
        .def(
            "match_items",
            [](Core& core, Tokens tokens, std::span<const Item> items, std::string_view context,
               bool reads,
               bool writes) { return core.match(tokens, context, reads, writes, items); },
            "tokens"_a, "items"_a, "context"_a = "", "reads"_a = true, "writes"_a = true,
            "match() of a prompt with items: (content hash, offset, length).")
        .def("would_hit", &would_hit, "tokens"_a, "items"_a, "context"_a = "",
             "(device_blocks, host_blocks) that match would find; opens no lease, and refreshes no "
             "recency.")
        .def(
            "allocate",
            [](Core& core, LeaseId id, std::int64_t num_tokens, Reserve reserve) {
                return static_cast<int>(core.allocate(id, num_tokens, reserve));
            },
            "lease"_a, "num_tokens"_a, "reserve_blocks"_a = nb::none(),
            "Take refs and all blocks. 0: no room, nothing taken; 1: all there; 2: some load. "
            "`reserve_blocks`: None for the configured number.")
        .def(
            "prolong",
            [](Core& core, LeaseId id, Tokens tokens) {
                return static_cast<int>(core.prolong(id, tokens));
            },
            "lease"_a, "tokens"_a,
            "Add the cached blocks of the next tokens to a granted lease that computes nothing. "
            "Returns as allocate does; 0 also if none of them is cached.")
        .def("pending", &Core::pending, "lease"_a,
             "(lease, blocks): the lease that will compute what follows the match; (0, 0): none.")
        .def("can_allocate", &Core::can_allocate, "lease"_a, "num_tokens"_a, "saves"_a = false,
             "reserve_blocks"_a = nb::none(),
             "Return whether allocate would grant now; `saves`: after take_write_backs found "
             "nothing.")
        .def("allocatable_blocks", &Core::allocatable_blocks, "limit"_a, "saves"_a = false,
             "salt"_a = "",
             "Device blocks that allocate could take now for a lease of `salt` without cached "
             "blocks, whatever the reserve, up to `limit`; `saves` as for can_allocate.")
        .def("extendable_blocks", &Core::extendable_blocks, "limit"_a, "saves"_a = false,
             "salt"_a = "",
             "Device blocks that extend could take now, up to `limit`, if its first lease is of "
             "`salt`; `saves` as for can_allocate.")
        .def(
            "indexed_blocks",
            [](const Core& core, LeaseId id) { return core.lease(id).path.size(); }, "lease"_a,
            "Blocks of the lease that are in the index, from the first on.")
        .def("rematch", &rematch, "lease"_a,
             "(cached_tokens, prompt_tokens) of a lease that waits for its grant: of a match made "
             "now. The hit counts as used now.")
        .def("check_request", &Core::check_request, "lease"_a, "num_tokens"_a,
             "reserve_blocks"_a = nb::none(),
             "Raise what allocate would for a request that can never be granted.")
        .def("retract", &Core::retract, "lease"_a, "step"_a = 0,
             "Undo allocate; the lease stays matched. Return the lease that keeps the blocks for "
             "the batches in flight, or 0.")
        .def("lease_state", of_lease(&Lease::state), "lease"_a,
             "Return the state of the lease; a lease that has ended raises LeaseError.")
        .def(
            "computes", [](const Core& core, LeaseId id) { return core.lease(id).flags.computes; },
            "lease"_a, "False if the lease only keeps its hit.")
        .def("hit", &hit, "lease"_a, "(device_blocks, host_blocks) as matched, or as granted.")
        .def(
            "hit_blocks", [](Core& core, LeaseId id) { return copy_ids(core.hit_blocks(id)); },
            "lease"_a, "Device ids of the hit: of a match made now, or of the grant.")
        .def("onloads", of_lease(&Lease::onloads), "lease"_a,
             "Unfinished transfers that write blocks of the lease.")
        .def(
            "append", [](Core& core, LeaseId id, Tokens tokens) { core.append(id, tokens); },
            "lease"_a, "tokens"_a)
        .def("append_items", &Core::append, "lease"_a, "tokens"_a, "items"_a,
             "append() with items; offsets count from the first position of the prompt.")
        .def("commit", &Core::commit, "lease"_a, "num_tokens"_a, "step"_a = 0,
             "Index computed blocks; returns how many became shareable.")
        .def("advance", &advance, "leases"_a, "tokens"_a, "width"_a, "counts"_a.none(),
             "draft_tokens"_a = 0, "step"_a = 0,
             "Name the tokens that a step has produced, rows of `width`, of which counts[i] count "
             "(None: all); commit all positions before the last token of each lease, and give the "
             "lease draft_tokens positions behind that token. Return (published blocks, rows "
             "without room, rows that got blocks, device blocks that are computed now).")
        .def("truncate", &Core::truncate, "lease"_a, "num_tokens"_a, "step"_a = 0,
             "Return what retract() returns.")
        .def("extend", &Core::extend, "leases"_a, "num_tokens"_a)
        .def(
            "commit_blocks",
            [](Core& core, LeaseId id, Tokens ids, Tokens tokens, std::optional<Tokens> group_ids,
               Step step, std::uint32_t kept_blocks) {
                return core.commit_blocks(id, ids, tokens, group_ids.value_or(Tokens()), step,
                                          kept_blocks);
            },
            "lease"_a, "ids"_a, "tokens"_a, "group_ids"_a = nb::none(), "step"_a = 0,
            "kept_blocks"_a = 0,
            "assign() ids whose positions are computed, append() tokens, and commit() all "
            "positions of the table.")
        .def(
            "retire", &Core::retire, "lease"_a, "label"_a = "",
            "Drop the refs of a lease whose ids the server's cache keeps. Return False if it could "
            "not save blocks later.")
        .def(
            "assign",
            [](Core& core, LeaseId id, Tokens ids, std::int64_t computed_tokens,
               std::optional<Tokens> group_ids) {
                core.assign(id, ids, computed_tokens, group_ids.value_or(Tokens()));
            },
            "lease"_a, "ids"_a, "computed_tokens"_a = 0, "group_ids"_a = nb::none(),
            "Append device ids of a server to the table of a lease; group_ids has one row of as "
            "many ids per other group, -1 for none, or is empty.")
        .def("is_idle", &Core::is_idle, "lease"_a,
             "Return whether no transfer uses ids that the lease, which may have ended, has named.")
        .def("idle_after_step", &Core::idle_after_step, "lease"_a,
             "Return the newest unfinished step that the transfers of is_idle() wait for, or 0.")
        .def(
            "take_queued_ids", [](Core& core) { return copy_ids(core.take_queued_ids()); },
            "Return the device ids of the external saves that were queued since the last call.")
        .def("give_up_saves", &Core::give_up_saves,
             "Save nothing of what external saves have queued.")
        .def("settle", &settle,
             "End the released leases that waited for external saves only. Return these leases, "
             "those of which saves have made blocks matchable, and those that have become idle; "
             "or None if there are none.")
        .def("release", &Core::release, "lease"_a, "step"_a = 0, "used_in"_a = 0, "label"_a = "",
             "Return False when batches or transfers of peers in flight keep the blocks until they "
             "have ended. `label`: see Lease.release; \"\" for none.")
        .def("begin_batch", &Core::begin_batch, "leases"_a,
             "Begin a batch that computes with these leases; return its number.")
        .def("has_onloads", &Core::has_onloads, "leases"_a,
             "Return True while a lease has onloads in flight.")
        .def("end_batch", &Core::end_batch, "batch"_a, "step"_a = 0,
             "End a batch, or let its work belong to `step`; return the leases that this releases.")
        .def("batches", &Core::batches, "lease"_a,
             "Return the batches in flight that compute with the lease.")
        .def(
            "is_released",
            [](const Core& core, LeaseId id) { return core.lease(id).is(LeaseState::kReleasing); },
            "lease"_a,
            "Return whether the lease is released while batches in flight keep its blocks.")
        .def("recompute_from", &Core::recompute_from, "lease"_a)
        .def(
            "block_table",
            [](Core& core, LeaseId id, GroupId group) {
                return copy_ids(core.table_of(id, group));
            },
            "lease"_a, "group"_a = -1, "Of all layers but those of window groups, or of one group.")
        .def("max_extend_tokens", &Core::max_extend_tokens, "lease"_a,
             "Positions that have blocks in every window group.")
        .def_prop_ro("hold_times", &Core::hold_times, nb::rv_policy::reference_internal,
                     "Times for which leases that compute had blocks; those that ended.")
        .def(
            "block_tables",
            [](Core& core, std::span<const LeaseId> ids, TableArray out, std::int32_t fill,
               GroupId group) {
                core.block_tables(ids, {out.data(), out.size()}, out.shape(0), fill, group);
            },
            "leases"_a, "out"_a.noconvert(), "fill"_a, "group"_a = -1,
            "Write the block tables into rows of `out`, the rest of each row `fill`.")
        .def("longest_table", &Core::longest_table, "leases"_a,
             "Number of blocks of the longest block table.")
        .def(
            "lengths",
            [](const Core& core, std::span<const LeaseId> ids) {
                return copy_ids(core.lengths(ids));
            },
            "leases"_a, "Number of named positions of each lease; 0 for a released one.")
        .def("is_current", &Core::is_current, "lease"_a,
             "Return whether the lease is granted and its hit can still be matched.")
        .def("await_use", &Core::await_use, "lease"_a,
             "Let take_used() return the lease once another lease has hit all that it holds.")
        .def("awaits_use", &Core::awaits_use, "lease"_a,
             "Return whether await_use() was called, and the hit was not used since then.")
        .def("take_used", &Core::take_used,
             "Return leases of await_use() whose hit was used since the last call.")
        .def(
            "is_granted", [](Core& core, LeaseId id) { return core.lease(id).has_blocks(); },
            "lease"_a)
        .def("num_tokens", of_lease(&Lease::num_tokens), "lease"_a)
        .def("cached_tokens", of_lease(&Lease::cached_tokens), "lease"_a)
        .def("usage", &Core::usage, "lease"_a,
             "(prompt_tokens, cached_device_tokens, cached_host_tokens, computed_blocks).")
        .def(
            "cached_store_tokens",
            [](const Core& core, LeaseId id) { return core.usage(id).cached_store_tokens; },
            "lease"_a, "Of the cached tokens: those whose blocks a fetch brought for this lease.")
        .def("note_left_in_store", &note_left_in_store, "lease"_a, "blocks"_a, "why"_a,
             "Note that stores have the first blocks of a prompt, and why not all were fetched: "
             "'declined', 'late' or 'failed'.")
        .def("missed", &miss_tuples, "lease"_a,
             "Causes of the missed blocks of the last grant: (first block, end, cause, seconds "
             "since "
             "the eviction, its cause or why a store's blocks were not fetched, whether the host "
             "had the last copy, lease that needed the "
             "room or computes the blocks, other context, (position, token, known token)).")
        .def("group_hit", &group_hit, "lease"_a, "group"_a,
             "(device_blocks, host_blocks) of the last grant in a group; group -1: state.")
        .def("missing", &missing, "lease"_a, "blocks"_a = Fetches::kMostMissing,
             "(first block, digests) of the first blocks behind the cached ones that stores may "
             "have.")
        .def("begin_fetch", &Core::begin_fetch, "lease"_a, "blocks"_a, "replaced"_a = 0,
             "Begin to fetch missing blocks, or join the fetch that brings the first, unless it is "
             "`replaced`; 0: none.")
        .def(
            "boundaries", &boundaries, "lease"_a, "skip"_a = 0,
            "(hit, cached, first_block, digests, may_end) of the blocks behind the hit, from block "
            "hit + skip on; may_end: one byte per block, 0 where a hit would cut an item.")
        .def(
            "has_copies",
            [](Core& core, LeaseId id, GroupId group, std::size_t first, std::size_t end) {
                return byte_flags(core.has_copies(id, group, first, end));
            },
            "lease"_a, "group"_a, "first_block"_a, "end_block"_a,
            "One byte per cached block: 1 if a tier has its copy in the group; group -1: state.")
        .def(
            "begin_auxiliary_fetch", &Core::begin_auxiliary_fetch, "lease"_a, "group"_a, "blocks"_a,
            "Begin to fetch what a hit of the first blocks lacks in the group, or join a fetch; 0: "
            "none.")
        .def("wants_saves", &Core::wants_saves)
        .def("take_saves", &Core::take_saves, "Begin a save; 0: there is nothing to save.")
        .def("store_transfer", &store_transfer, "transfer"_a,
             "(group, host_blocks, digests, follows) of a fetch or a save in flight.")
        .def("receive", with_ticket(&Core::receive), "lease"_a, "ticket_id"_a, "num_tokens"_a,
             "group"_a = kAttention, "first_block"_a = 0, "step"_a = 0,
             "Begin to receive the blocks of a group that are needed behind `num_tokens` "
             "positions: of group -2, full attention, those from `first_block` on; of group -1 the "
             "recurrent state, the end of which commits these positions. Return the transfer.")
        .def(
            "send",
            [](Core& core, LeaseId id, const nb::bytes& ticket, std::int64_t num_tokens,
               GroupId group, std::int64_t first_block, std::uint32_t first_range,
               std::uint32_t end_range, std::uint64_t mark, Step step) {
                return core.send(id, ticket_id(ticket), num_tokens, group, first_block,
                                 {first_range, end_range}, mark, step);
            },
            "lease"_a, "ticket_id"_a, "num_tokens"_a, "group"_a = kAttention, "first_block"_a = 0,
            "first_range"_a = 0, "end_range"_a = 0, "mark"_a = 0, "step"_a = 0,
            "Begin to send the blocks of a group that are needed behind `num_tokens` computed "
            "positions; of group -2 those from `first_block` on, or ranges of their layers, which "
            "need not be computed before a mark. Return the transfer.")
        .def("end_ticket", with_ticket(&Core::end_ticket), "lease"_a, "ticket_id"_a,
             "No caller waits for the transfers of the ticket: those in flight are abandoned.")
        .def("commit_received", &Core::commit_received, "lease"_a, "num_tokens"_a,
             "Index received blocks; returns how many became shareable.")
        .def(
            "prompt_digest",
            [](const Core& core, LeaseId id, std::int64_t num_tokens) {
                const Digest digest = core.prompt_digest(id, num_tokens);
                return nb::bytes(digest.data(), digest.size());
            },
            "lease"_a, "num_tokens"_a, "Digest of the first positions, for any block_tokens.")
        .def(
            "peer_transfer", &peer_transfer, "transfer"_a,
            "(receives, ticket_id, group, blocks of the prompt, own blocks or the state slot, "
            "after_step, (first range of layers, end range), mark); group -1: recurrent state, -2: "
            "all other layers without a window.")
        .def("peer_transfers", of_lease(&Lease::peer_transfers), "lease"_a,
             "Transfers in flight that receive or send blocks of the lease.")
        .def("take_peer_ends", &Core::take_peer_ends,
             "Return (transfer, lease, blocks, commits) of those that have ended since the last "
             "call, and "
             "whose lease has a handle.")
        .def("take_abandoned_peer_transfers", &Core::take_abandoned_peer_transfers)
        .def("is_in_flight", &Core::is_in_flight, "transfer"_a)
        .def("saving", &Core::saving, "lease"_a,
             "A backup of the lease's blocks that is under way and that a swap has to wait for; 0: "
             "none.")
        .def("swap_out", &Core::swap_out, "lease"_a, "step"_a = 0,
             "Begin to move the whole table to host memory; False, and nothing changed: no room.")
        .def("swap_transfer", of_lease(&Lease::swap_transfer), "lease"_a,
             "The transfer of a swap that is under way, or 0.")
        .def(
            "is_swapped",
            [](Core& core, LeaseId id) { return core.lease(id).is(LeaseState::kSwapped); },
            "lease"_a)
        .def("computed_tokens", of_lease(&Lease::computed_tokens), "lease"_a)
        .def(
            "uncovered_tokens",
            [](const Core& core, LeaseId id, std::int64_t num_tokens) {
                return core.lease(id).uncovered_tokens(num_tokens);
            },
            "lease"_a, "num_tokens"_a,
            "Return how many of the first `num_tokens` positions are neither computed, received, "
            "nor part of a batch.")
        .def(
            "fork",
            [](Core& core, LeaseId id, Step step) -> ForkTuple {
                const Fork fork = core.fork(id, step);
                return nb::make_tuple(fork.lease, copy_ids(fork.source_blocks),
                                      copy_ids(fork.target_blocks));
            },
            "lease"_a, "step"_a = 0,
            "(lease, source_blocks, target_blocks): blocks to copy on the device; lease 0: no "
            "room.")
        .def("hold_only", &Core::compute_nothing, "lease"_a, "whole"_a = false,
             "The lease will compute nothing: it gets no state slot. With `whole` it may hit the "
             "last block of its prompt.")
        .def("snapshot", &Core::snapshot, "lease"_a, "num_tokens"_a, "step"_a = 0,
             "(source, target): the state slot to copy on the device now; target -1: none.")
        .def("discard_snapshot", &Core::discard_snapshot, "lease"_a, "slot"_a,
             "The copy that snapshot() asked for was not made.")
        .def("snapshot_points", &Core::snapshot_points, "lease"_a)
        .def(
            "state_slot",
            [](const Core& core, LeaseId id) { return core.lease(id).recurrent.slot; }, "lease"_a,
            "The lease's own, or -1.")
        .def("is_move", &Core::is_move, "transfer"_a,
             "The transfer moves state slots or window blocks.")
        .def(
            "move",
            [](const Core& core, TransferId id) -> MoveTuple {
                const Move& move = core.move(id);
                return nb::make_tuple(move.route, move.group, id_bytes(move.sources),
                                      id_bytes(move.targets), move.after_step);
            },
            "transfer"_a,
            "(route, window group, source ids, target ids, after_step); group -1: state slots, of "
            "which source -1 is zeros.")
        .def("take_group_save", &Core::take_group_save,
             "Begin to copy blocks of one group besides attention to host memory; 0: there is "
             "nothing to copy.")
        .def("take_backups", &Core::take_backups,
             "Begin to back up a bounded number of queued blocks; 0: there is nothing to copy.")
        .def("has_queued_backups", &Core::has_queued_backups,
             "Return whether take_backups() has left blocks to its next call.")
        .def("take_write_backs", &Core::take_write_backs, "wanted_blocks"_a = 0)
        .def("wants_write_backs", &Core::wants_write_backs)
        .def("wants_backups", &Core::wants_backups)
        .def("must_look_further", &Core::must_look_further,
             "Return whether eviction stopped at a block that take_write_backs(more) has not seen.")
        .def("transfer", &transfer, "transfer"_a, "(device_blocks, host_blocks, after_step).")
        .def("complete", &Core::complete, "transfer"_a, "outcome"_a, "first_bad_block"_a = 0,
             "results"_a = nb::bytes("", 0),
             "`results`: of a save, one byte per block, or none. Return the leases that waited for "
             "a "
             "transfer of a peer and are released now.")
        .def("take_abandoned", &Core::take_abandoned)
        .def("mark_cancelling", &Core::mark_cancelling, "transfer"_a,
             "Note that a worker was asked to cancel a transfer: no other lease joins it.")
        .def("close_step", &Core::close_step, "step"_a)
        .def("finish_step", &Core::finish_step, "step"_a)
        .def("unfinished_step", &Core::unfinished_step,
             "Return the newest step that may still use blocks, or 0.")
        .def("retain", &Core::retain, "tokens"_a, "context"_a, "items"_a, "priority"_a, "end"_a,
             "Evict the cached blocks of a prompt after others until end_retentions(end).")
        .def("demote", &Core::demote, "tokens"_a, "context"_a, "items"_a,
             "Evict the last blocks of a prompt, which nothing else shares, before others.")
        .def("forget", &Core::forget, "tokens"_a, "context"_a, "items"_a,
             "Drop the last blocks of a prompt, which nothing else shares.")
        .def("end_retentions", &Core::end_retentions, "now"_a)
        .def("retained_blocks", &Core::retained_blocks,
             "Number of retained blocks that no lease uses, by context.")
        .def("evict_device", &Core::evict_device, "blocks"_a)
        .def("evict_host", &Core::evict_host, "blocks"_a)
        .def("resize_device", &Core::resize_device, "blocks"_a)
        .def_prop_ro("device_blocks", &Core::device_blocks)
        .def_prop_ro("granted_leases", &Core::granted_leases)
        .def_prop_ro("computing_leases", &Core::computing_leases,
                     "Leases that have blocks and compute, which those of pins do not.")
        .def_prop_ro("swapped_leases", &Core::swapped_leases)
        .def_prop_ro("computed_prompt_tokens", &Core::computed_prompt_tokens,
                     "As in the statistics.")
        .def("room", &Core::room,
             "(device_free, evictable, state_slots) that no lease holds; statistics() in O(1).")
        .def("forget_device", &Core::forget_device)
        .def("forget_host", &Core::forget_host)
        .def("reset", &Core::reset, "new_weights"_a = false)
        .def("purge", &Core::purge, "salt"_a)
        .def_prop_ro(
            "reports_stores", [](Core& core) { return core.events().has_stores(); },
            "True if an event stream reports the stores.")
        .def("note_lacking", &Core::note_lacking, "lease"_a,
             "Report that no store has the first missing block of a lease.")
        .def("statistics", &Core::statistics)
        .def("group_statistics", &Core::group_statistics, "group"_a)
        .def("violations", &Core::violations)
        .def(
            "oldest_leases",
            [](const Core& core, std::size_t limit) {
                std::vector<LeaseTuple> tuples;
                for (const Lease* lease : core.oldest_leases(limit)) {
                    tuples.push_back(lease_tuple(*lease, core.block_tokens()));
                }
                return tuples;
            },
            "limit"_a, "Open leases as describe() returns them, in bounded time.")
        .def(
            "describe",
            [](const Core& core, LeaseId id) {
                return lease_tuple(core.lease(id), core.block_tokens());
            },
            "lease"_a,
            "(id, age_seconds, prompt_tokens, cached_tokens, num_tokens, computed_tokens, blocks).")
        .def("hottest_prefixes", &hot_prefix_tuples, "limit"_a,
             "([(parent, node, context, first_block, blocks, device_blocks, host_blocks, uses, "
             "refs, children)], complete); parent is a place in the list, or -1.")
        .def("blocks", &blocks,
             "Return the blocks that can be matched: (context, prefix tokens, device id, host id, "
             "flags, refs, pins). Flags: 1 device valid, 2 device loading, 4 host valid, "
             "8 host loading.");
}

}  // namespace aiokv
