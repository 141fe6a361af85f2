// The cpu device: events, streams, block copies, and the timer of the event poller.
#include "aiokv/copy.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "aiokv/slots.hpp"
#include "aiokv/timer.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using IdArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// (layer, device pointer, device stride, bytes, offset in the host block)
using PieceTuple = std::tuple<std::size_t, std::uintptr_t, std::size_t, std::size_t, std::size_t>;
using Released = nb::call_guard<nb::gil_scoped_release>;

std::span<const std::int32_t> ids(const IdArray& array) {
    return {array.data(), array.size()};
}

std::shared_ptr<BlockMap> make_map(std::size_t num_layers, const std::vector<PieceTuple>& pieces,
                                   std::uintptr_t host_base, std::size_t host_stride,
                                   std::int64_t host_blocks, std::int64_t device_blocks) {
    auto map = std::make_shared<BlockMap>();
    map->layers.resize(num_layers);
    map->host_base = host_base;
    map->host_stride = host_stride;
    map->host_blocks = host_blocks;
    map->device_blocks = device_blocks;
    for (const auto& [layer, base, stride, bytes, offset] : pieces) {
        if (layer >= num_layers) throw LayoutError("a piece of layer " + std::to_string(layer));
        map->layers[layer].push_back({base, stride, bytes, offset});
    }
    map->check();
    return map;
}

Direction direction_of(bool onload) {
    return onload ? Direction::kOnload : Direction::kOffload;
}

// Event and BlockMap are created by make_shared: a reference that Python created would need the GIL
// when it is dropped on a stream's thread, and another thread may join that thread with the GIL
// held.
void bind_event(nb::module_& m) {
    nb::class_<Event>(m, "Event", "A point in a stream's order. Thread-safe.")
        .def(nb::new_([] { return std::make_shared<Event>(); }))
        .def_prop_ro("done", &Event::done, "Recorded and finished, successfully or not.")
        .def_prop_ro("recorded", &Event::recorded)
        .def_prop_ro("generation", &Event::generation, "Number of recordings so far.")
        .def_prop_ro(
            "error",
            [](const Event& event) -> std::optional<std::string> {
                auto error = event.error();
                return error.empty() ? std::nullopt : std::optional(std::move(error));
            },
            "Text of the failure; None while not done and on success.")
        .def_prop_ro(
            "finished_seconds",
            [](const Event& event) -> std::optional<double> {
                const auto ns = event.finished_ns();
                return ns == 0 ? std::nullopt : std::optional(static_cast<double>(ns) * 1e-9);
            },
            "time.monotonic() at the end; None while not done.")
        .def(
            "begin", [](Event& event) { event.open(); },
            "Record the event for work of the host, which finish() ends; streams may wait for it.")
        .def(
            "finish",
            [](Event& event, std::string error) {
                event.finish(event.generation(), std::move(error));
            },
            "error"_a = "", "End the host's work; an error fails what waits for it.")
        .def("synchronize", &Event::synchronize, Released(), "Block until it is done.");
}

void bind_stream(nb::module_& m) {
    nb::class_<Stream>(m, "Stream", "A thread that executes its work in order of submission.")
        .def(nb::init<std::string>(), "name"_a)
        .def_prop_ro("name", &Stream::name)
        .def_prop_ro("depth", &Stream::depth, "Work items and records that have not finished.")
        .def("record", &Stream::record, "event"_a,
             "Finish `event` when all work so far has finished.")
        .def("wait_event", &Stream::wait_event, "event"_a,
             "Start later work after the event, which must have been recorded.")
        .def("synchronize", &Stream::synchronize, Released(),
             "Block until all work so far is done.")
        .def("close", &Stream::close, Released(), "Execute the queued work, then join the thread.")
        .def("abort", &Stream::abort, Released(), "Fail the queued work, then join the thread.");
}

void bind_job(nb::module_& m) {
    nb::class_<BlockMap>(m, "BlockMap",
                         "Addresses of the blocks of both tiers. Borrows the memory.")
        .def(nb::new_(&make_map), "num_layers"_a, "pieces"_a, "host_base"_a, "host_stride"_a,
             "host_blocks"_a, "device_blocks"_a);
    nb::class_<CopyJob>(m, "CopyJob", "One transfer in flight. Thread-safe.")
        .def_prop_ro("layer_events", &CopyJob::events)
        .def_prop_ro(
            "error",
            [](const CopyJob& job) -> std::optional<std::pair<std::size_t, std::string>> {
                auto error = job.error();
                if (!error) return std::nullopt;
                return std::pair(error->first_bad_block, std::move(error->reason));
            },
            "(first bad block, reason), or None.");
}

// `owner` keeps the memory alive while the stream exists, which may still be copying.
std::shared_ptr<CopyJob> copy(Stream& stream, std::shared_ptr<BlockMap> map, const IdArray& host,
                              const IdArray& device, bool onload, std::shared_ptr<Event> after,
                              const nb::object& /*owner*/) {
    nb::gil_scoped_release released;
    return copy_blocks(stream, std::move(map), direction_of(onload), ids(host), ids(device),
                       std::move(after));
}

using SlotPieceTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t>;

std::shared_ptr<CopyJob> slots(Stream& stream, const std::vector<SlotPieceTuple>& tuples,
                               std::int64_t num_slots, const IdArray& sources,
                               const IdArray& targets, std::shared_ptr<Event> after,
                               const nb::object& /*owner*/) {
    std::vector<SlotPiece> pieces;
    for (const auto& [base, stride, bytes] : tuples) pieces.push_back({base, stride, bytes});
    nb::gil_scoped_release released;
    return move_slots(stream, std::move(pieces), num_slots, ids(sources), ids(targets),
                      std::move(after));
}

using TensorTuple = nb::typed<nb::tuple, std::uintptr_t, std::vector<std::int64_t>,
                              std::vector<std::int64_t>, std::uint64_t, int>;

// Keeps the exporter's memory alive.
struct DlpackTensor {
    nb::ndarray<> array;
};

// Any element type, including those without a numpy name, such as bfloat16 and float8.
TensorTuple layout(const DlpackTensor& tensor) {
    const nb::ndarray<>& array = tensor.array;
    std::vector<std::int64_t> shape, strides;
    for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
        shape.push_back(static_cast<std::int64_t>(array.shape(axis)));
        strides.push_back(array.stride(axis));
    }
    const nb::dlpack::dtype type = array.dtype();
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape, strides,
                          std::uint64_t{type.bits} * type.lanes, array.device_type());
}

void bind_dlpack(nb::module_& m) {
    nb::class_<DlpackTensor>(m, "DlpackTensor", "Memory of a DLPack capsule; borrowed.")
        .def(
            "__init__",
            [](DlpackTensor* self, nb::ndarray<> array) {
                new (self) DlpackTensor{std::move(array)};
            },
            "capsule"_a, nb::sig("def __init__(self, capsule: object) -> None"))
        .def_prop_ro("layout", &layout,
                     "(pointer, shape, strides in elements, bits of an element, DLPack device "
                     "type).");
}

void bind_timer(nb::module_& m) {
    nb::class_<TimerFd>(m, "TimerFd", "A monotonic timer as a file descriptor.")
        .def(nb::init<>())
        .def("fileno", &TimerFd::fd)
        .def(
            "arm",
            [](TimerFd& timer, double delay_seconds) {
                timer.arm(static_cast<std::int64_t>(delay_seconds * 1e9));
            },
            "delay_seconds"_a, "Expire once, after delay_seconds; replaces an earlier arming.")
        .def("drain", &TimerFd::drain, "Read the expiry, so that select() waits again.")
        .def("close", &TimerFd::close);
}

}  // namespace

void bind_copy(nb::module_& m) {
    bind_event(m);
    bind_stream(m);
    bind_job(m);
    bind_dlpack(m);
    bind_timer(m);
    m.def(
        "check_ids",
        [](const IdArray& source_ids, const IdArray& target_ids, const std::string& source,
           std::int64_t source_blocks, const std::string& target, std::int64_t target_blocks) {
            const auto name = [](const std::string& pool) {
                return pool == "state" ? pool + " slot" : pool + " block";
            };
            const std::string source_name = name(source), target_name = name(target);
            check_ids({.sources = ids(source_ids),
                       .targets = ids(target_ids),
                       .zeros = source == "state",
                       .same_pool = source == target},
                      {source_name.c_str(), source_blocks}, {target_name.c_str(), target_blocks});
        },
        "source_ids"_a, "target_ids"_a, nb::kw_only(), "source"_a, "source_blocks"_a, "target"_a,
        "target_blocks"_a,
        "Raise UsageError on ids out of range, unequal or empty lists, duplicate destinations, and "
        "a destination that is a source of the same pool. Pools: 'device', 'host', 'state'.");
    m.def("copy_blocks", &copy, "stream"_a, "block_map"_a, "host_ids"_a, "device_ids"_a,
          nb::kw_only(), "onload"_a, "after"_a.none(), "owner"_a, nb::keep_alive<1, 7>(),
          "Queue a copy and return at once. Raises as check_ids() does, before the first byte "
          "moves.");
    m.def("move_slots", &slots, "stream"_a, "pieces"_a, "num_slots"_a, "sources"_a, "targets"_a,
          nb::kw_only(), "after"_a.none(), "owner"_a, nb::keep_alive<1, 7>(),
          "Queue copies (source -1: zeros) of state slots; pieces are (pointer, stride, bytes).");
}

}  // namespace aiokv
