// aiokv._native.cuda. Handles of streams and events are plain integers. Each call that may enter
// the driver releases the GIL first: otherwise a driver thread that needs the GIL would deadlock.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_engine.hpp"
#include "aiokv/cuda_slots.hpp"
#include "aiokv/cuda_swap_blocks.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using cuda::Path;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;
using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SliceTuple = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::size_t>;

template <typename Handle>
Handle handle(std::uintptr_t value) {
    return reinterpret_cast<Handle>(value);
}

// The event that the poller queries: one native object per layer, without a Python frame.
struct LayerEvent {
    std::shared_ptr<cuda::Transfer> transfer;
    std::uint32_t layer;
};

cuda::Layout make_layout(std::uint32_t device_blocks, std::uint32_t host_blocks,
                         std::uintptr_t host_base, std::size_t host_pitch,
                         const std::vector<SliceTuple>& slices,
                         const std::vector<std::uint32_t>& layer_begin) {
    cuda::Layout layout;
    layout.device_blocks = device_blocks;
    layout.host_blocks = host_blocks;
    layout.host_base = host_base;
    layout.host_pitch = host_pitch;
    layout.layer_begin = layer_begin;
    for (const auto& [base, stride, bytes, offset, host_bytes] : slices) {
        layout.slices.push_back({base, stride, bytes, offset, host_bytes});
    }
    return layout;
}

std::shared_ptr<cuda::Transfer> submit(cuda::SwapEngine& engine, Direction direction, Ids host,
                                       Ids device, std::uintptr_t after, Path path) {
    const std::span<const std::int32_t> host_ids(host.data(), host.shape(0));
    const std::span<const std::int32_t> device_ids(device.data(), device.shape(0));
    nb::gil_scoped_release release;
    return engine.submit(direction, host_ids, device_ids, handle<cudaEvent_t>(after), path);
}

void bind_registration(nb::module_& m) {
    using cuda::HostRegistration;
    nb::class_<HostRegistration>(m, "HostRegistration",
                                 "Pins a range of host memory in the background, chunk by chunk.")
        .def(
            "__init__",
            [](HostRegistration* self, std::uintptr_t base, std::size_t num_bytes, int device,
               std::size_t chunk_bytes, unsigned touch_threads, int numa_node, bool numa_strict) {
                new (self) HostRegistration(
                    base, num_bytes, {device, chunk_bytes, touch_threads, numa_node, numa_strict});
            },
            "base"_a, "num_bytes"_a, nb::kw_only(), "device"_a,
            "chunk_bytes"_a = std::size_t{64} << 20, "touch_threads"_a = 8, "numa_node"_a = -1,
            "numa_strict"_a = false, ReleaseGil())
        .def_prop_ro("ready_bytes", &HostRegistration::ready_bytes)
        .def_prop_ro("total_bytes", &HostRegistration::total_bytes)
        .def_prop_ro("finished", &HostRegistration::finished)
        .def_prop_ro("elapsed_seconds", &HostRegistration::elapsed_seconds)
        .def("wait_ready", &HostRegistration::wait_ready, "num_bytes"_a, ReleaseGil())
        .def("cancel", &HostRegistration::cancel, ReleaseGil())
        .def("close", &HostRegistration::close, ReleaseGil());
}

void bind_transfer(nb::module_& m) {
    using cuda::Transfer;
    nb::class_<LayerEvent>(m, "LayerEvent", "The end of one layer of a transfer.")
        .def_prop_ro(
            "done", [](LayerEvent& event) { return event.transfer->layer_done(event.layer); },
            ReleaseGil())
        .def(
            "synchronize", [](LayerEvent& event) { event.transfer->synchronize(event.layer); },
            ReleaseGil());
    nb::class_<Transfer>(m, "Transfer", "A transfer that the engine has accepted.")
        .def_prop_ro("num_layers", &Transfer::num_layers)
        .def_prop_ro("started", &Transfer::started)
        .def("layer_done", &Transfer::layer_done, "layer"_a, ReleaseGil())
        .def("wait_submitted", &Transfer::wait_submitted, "layer"_a, "seconds"_a = nb::none(),
             ReleaseGil())
        .def("synchronize", &Transfer::synchronize, "layer"_a, ReleaseGil())
        .def(
            "stream_wait",
            [](Transfer& transfer, std::uint32_t layer, std::uintptr_t stream) {
                transfer.stream_wait(layer, handle<cudaStream_t>(stream));
            },
            "layer"_a, "stream"_a, ReleaseGil())
        .def("layer_milliseconds", &Transfer::layer_milliseconds, "layer"_a, ReleaseGil())
        .def("failure",
             [](const Transfer& transfer)
                 -> std::optional<std::tuple<std::uint32_t, int, std::string>> {
                 const auto failure = transfer.failure();
                 if (!failure) {
                     return std::nullopt;
                 }
                 return std::tuple(failure->first_bad_block, failure->code, failure->reason);
             })
        .def("groups",
             [](const Transfer& transfer) {
                 std::vector<std::tuple<std::uint32_t, std::uint32_t, Path>> groups;
                 for (const cuda::Group& group : transfer.groups()) {
                     groups.emplace_back(group.first_layer, group.end_layer, group.path);
                 }
                 return groups;
             })
        .def(
            "layer_event",
            [](const std::shared_ptr<Transfer>& transfer, std::uint32_t layer) {
                return LayerEvent{transfer, layer};
            },
            "layer"_a);
}

void init_engine(cuda::SwapEngine* self, cuda::HostRegistration& host, std::uint32_t device_blocks,
                 std::uint32_t host_blocks, std::uintptr_t host_base, std::size_t host_pitch,
                 const std::vector<SliceTuple>& slices,
                 const std::vector<std::uint32_t>& layer_begin,
                 std::tuple<std::uintptr_t, std::uintptr_t> onload_streams,
                 std::tuple<std::uintptr_t, std::uintptr_t> offload_streams, int device,
                 bool timing, std::size_t slot_bytes, std::uint32_t num_slots,
                 std::uint32_t queued_pieces, int staged_blocks, int direct_blocks,
                 std::uint32_t max_group_layers, std::size_t min_strided_copy_bytes,
                 std::size_t min_batched_copy_bytes, std::size_t bytes_per_batched_copy) {
    cuda::EngineOptions options;
    options.device = device;
    options.timing = timing;
    options.slot_bytes = slot_bytes;
    options.num_slots = num_slots;
    options.queued_pieces = queued_pieces;
    options.staged_blocks = staged_blocks;
    options.direct_blocks = direct_blocks;
    options.planner.max_group_layers = max_group_layers;
    options.planner.min_strided_copy_bytes = min_strided_copy_bytes;
    options.planner.min_batched_copy_bytes = min_batched_copy_bytes;
    options.planner.bytes_per_batched_copy = bytes_per_batched_copy;
    auto streams = [](std::tuple<std::uintptr_t, std::uintptr_t> pair) {
        return cuda::LaneStreams{handle<cudaStream_t>(std::get<0>(pair)),
                                 handle<cudaStream_t>(std::get<1>(pair))};
    };
    new (self) cuda::SwapEngine(
        make_layout(device_blocks, host_blocks, host_base, host_pitch, slices, layer_begin),
        options, streams(onload_streams), streams(offload_streams), host);
}

void bind_engine(nb::module_& m) {
    using cuda::SwapEngine;
    const cuda::EngineOptions defaults;
    nb::class_<SwapEngine>(m, "SwapEngine", "The staged swap engine of one GPU.")
        .def("__init__", &init_engine, nb::keep_alive<1, 2>(), "host"_a, nb::kw_only(),
             "device_blocks"_a, "host_blocks"_a, "host_base"_a, "host_pitch"_a, "slices"_a,
             "layer_begin"_a, "onload_streams"_a, "offload_streams"_a, "device"_a,
             "timing"_a = false, "slot_bytes"_a = defaults.slot_bytes,
             "num_slots"_a = defaults.num_slots, "queued_pieces"_a = defaults.queued_pieces,
             "staged_blocks"_a = defaults.staged_blocks, "direct_blocks"_a = defaults.direct_blocks,
             "max_group_layers"_a = defaults.planner.max_group_layers,
             "min_strided_copy_bytes"_a = defaults.planner.min_strided_copy_bytes,
             "min_batched_copy_bytes"_a = defaults.planner.min_batched_copy_bytes,
             "bytes_per_batched_copy"_a = defaults.planner.bytes_per_batched_copy, ReleaseGil())
        .def("submit", &submit, "direction"_a, "host_ids"_a, "device_ids"_a, "after"_a = 0,
             "path"_a = Path::kAuto)
        .def("close", &SwapEngine::close, ReleaseGil())
        .def(
            "groups",
            [](const SwapEngine& engine, Direction direction) {
                std::vector<std::tuple<std::uint32_t, std::uint32_t>> groups;
                for (const cuda::Group& group : engine.groups(direction)) {
                    groups.emplace_back(group.first_layer, group.end_layer);
                }
                return groups;
            },
            "direction"_a)
        .def_prop_ro("cpu_seconds", &SwapEngine::cpu_seconds)
        .def_prop_ro("broken_code", [](const SwapEngine& engine) { return engine.health().code(); })
        .def_prop_ro("broken_reason",
                     [](const SwapEngine& engine) { return engine.health().reason(); })
        .def(
            "hold",
            [](SwapEngine& engine, Direction direction, bool held) {
                engine.lane(direction).hold(held);
            },
            "direction"_a, "held"_a, "For tests: keep the submitting thread back.", ReleaseGil())
        .def(
            "fail_at",
            [](SwapEngine& engine, Direction direction, std::uint32_t layer, int code) {
                engine.lane(direction).fail_at(layer, code);
            },
            "direction"_a, "layer"_a, "code"_a, "For tests: fail before this layer.", ReleaseGil());
}

std::span<const std::uint8_t> span_of(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

std::span<const std::int32_t> span_of(const Ids& ids) {
    return {ids.data(), ids.shape(0)};
}

cuda::DeviceMemory::Handle memory_handle(const nb::bytes& bytes) {
    cuda::DeviceMemory::Handle handle;
    if (bytes.size() != handle.size()) {
        throw UsageError("handle has " + std::to_string(bytes.size()) + " bytes; it must have " +
                         std::to_string(handle.size()));
    }
    std::memcpy(handle.data(), bytes.data(), handle.size());
    return handle;
}

void swap_blocks(const std::vector<SliceTuple>& pairs, const Ids& host_ids, const Ids& device_ids,
                 Direction direction, int device, std::uintptr_t stream) {
    nb::gil_scoped_release release;
    std::vector<cuda::TensorPair> all;
    all.reserve(pairs.size());
    for (const auto& [device_base, device_stride, host_base, host_stride, bytes] : pairs) {
        all.push_back({device_base, device_stride, host_base, host_stride, bytes});
    }
    cuda::swap_blocks(all, span_of(host_ids), span_of(device_ids), direction, device,
                      handle<cudaStream_t>(stream));
}

void bind_slot_memory(nb::module_& m) {
    using cuda::DeviceMemory;
    using cuda::MappedMemory;
    nb::class_<DeviceMemory>(m, "DeviceMemory", "Device memory that other processes can map.")
        .def(nb::init<int, std::size_t>(), "device"_a, "num_bytes"_a, ReleaseGil())
        .def_prop_ro("address", &DeviceMemory::address)
        .def_prop_ro("num_bytes", &DeviceMemory::num_bytes)
        .def_prop_ro("device", &DeviceMemory::device)
        .def("handle",
             [](const DeviceMemory& memory) {
                 const DeviceMemory::Handle handle = memory.handle();
                 return nb::bytes(handle.data(), handle.size());
             })
        .def("close", &DeviceMemory::close, ReleaseGil());
    nb::class_<MappedMemory>(m, "MappedMemory", "Memory of another process, mapped by its handle.")
        .def(
            "__init__",
            [](MappedMemory* self, int device, const nb::bytes& handle) {
                const DeviceMemory::Handle raw = memory_handle(handle);
                nb::gil_scoped_release release;
                new (self) MappedMemory(device, raw);
            },
            "device"_a, "handle"_a)
        .def_prop_ro("address", &MappedMemory::address)
        .def("close", &MappedMemory::close, ReleaseGil());
}

void bind_slot_work(nb::module_& m) {
    using cuda::SlotWork;
    nb::class_<SlotWork>(m, "SlotWork", "Submitted passes or copies; also an event.")
        .def_prop_ro("done", &SlotWork::done, ReleaseGil())
        .def("synchronize", &SlotWork::synchronize, ReleaseGil())
        .def(
            "stream_wait",
            [](SlotWork& work, std::uintptr_t stream) {
                work.stream_wait(handle<cudaStream_t>(stream));
            },
            "stream"_a, ReleaseGil())
        .def("results",
             [](SlotWork& work) {
                 const std::vector<std::uint8_t> results = work.results();
                 return nb::bytes(results.data(), results.size());
             })
        .def(
            "failure",
            [](const SlotWork& work) -> std::optional<std::tuple<std::uint32_t, int, std::string>> {
                const auto failure = work.failure();
                if (!failure) {
                    return std::nullopt;
                }
                return std::tuple(failure->first_bad_block, failure->code, failure->reason);
            });
}

void bind_slots(nb::module_& m) {
    using cuda::PeerCopies;
    using cuda::PeerCopy;
    using cuda::SlotEngine;
    nb::class_<SlotEngine>(m, "SlotEngine", "Passes between device blocks and slots.")
        .def(
            "__init__",
            [](SlotEngine* self, std::uint32_t device_blocks, std::uint32_t num_slots,
               std::uintptr_t address, std::size_t slot_bytes,
               const std::vector<SliceTuple>& slices, const std::vector<std::uint32_t>& layer_begin,
               std::uintptr_t send_stream, std::uintptr_t receive_stream, int device, int blocks,
               bool bulk) {
                new (self) SlotEngine(
                    make_layout(device_blocks, num_slots, address, slot_bytes, slices, layer_begin),
                    {device, blocks, bulk}, handle<cudaStream_t>(send_stream),
                    handle<cudaStream_t>(receive_stream));
            },
            nb::kw_only(), "device_blocks"_a, "num_slots"_a, "address"_a, "slot_bytes"_a,
            "slices"_a, "layer_begin"_a, "send_stream"_a, "receive_stream"_a, "device"_a,
            "blocks"_a = cuda::SlotOptions{}.blocks, "bulk"_a = cuda::SlotOptions{}.bulk,
            ReleaseGil())
        .def(
            "gather",
            [](SlotEngine& engine, const Ids& device_ids, const Ids& slots, const nb::bytes& keys,
               std::uintptr_t after) {
                const auto key_bytes = span_of(keys);
                nb::gil_scoped_release release;
                return engine.gather(span_of(device_ids), span_of(slots), key_bytes,
                                     handle<cudaEvent_t>(after));
            },
            "device_ids"_a, "slots"_a, "keys"_a, "after"_a = 0)
        .def(
            "verify",
            [](SlotEngine& engine, const Ids& slots, const nb::bytes& keys) {
                const auto key_bytes = span_of(keys);
                nb::gil_scoped_release release;
                return engine.verify(span_of(slots), key_bytes);
            },
            "slots"_a, "keys"_a)
        .def(
            "scatter_verified",
            [](SlotEngine& engine, const Ids& slots, const Ids& device_ids, const nb::bytes& keys,
               std::uintptr_t after) {
                const auto key_bytes = span_of(keys);
                nb::gil_scoped_release release;
                return engine.scatter_verified(span_of(slots), span_of(device_ids), key_bytes,
                                               handle<cudaEvent_t>(after));
            },
            "slots"_a, "device_ids"_a, "keys"_a, "after"_a = 0)
        .def_prop_ro("fused", &SlotEngine::fused)
        .def_prop_ro("broken_code", [](const SlotEngine& engine) { return engine.health().code(); })
        .def_prop_ro("broken_reason",
                     [](const SlotEngine& engine) { return engine.health().reason(); })
        .def("close", &SlotEngine::close, ReleaseGil());
    nb::class_<PeerCopies>(m, "PeerCopies", "Contiguous copies to mapped memory, in order.")
        .def(nb::init<int>(), "device"_a, ReleaseGil())
        .def("close", &PeerCopies::close, ReleaseGil())
        .def(
            "copy",
            [](PeerCopies& copies,
               const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& list,
               cuda::SlotWork* after) {
                std::vector<PeerCopy> all;
                all.reserve(list.size());
                for (const auto& [target, source, num_bytes] : list) {
                    all.push_back({target, source, num_bytes});
                }
                nb::gil_scoped_release release;
                return copies.copy(all, after);
            },
            "copies"_a, "after"_a.none() = nb::none());
}

}  // namespace

void bind_cuda(nb::module_& module) {
    nb::module_ m = module.def_submodule("cuda", "Staged swaps between pinned memory and a GPU.");
    nb::enum_<Direction>(m, "Direction")
        .value("ONLOAD", Direction::kOnload)
        .value("OFFLOAD", Direction::kOffload);
    nb::enum_<Path>(m, "Path")
        .value("AUTO", Path::kAuto)
        .value("STAGED", Path::kStaged)
        .value("DIRECT", Path::kDirect);
    m.def("runtime_version", [] {
        int version = 0;
        cuda::check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
        return version;
    });
    bind_registration(m);
    bind_transfer(m);
    bind_engine(m);
    bind_slot_memory(m);
    bind_slot_work(m);
    bind_slots(m);
    m.def("swap_blocks", &swap_blocks, "pairs"_a, "host_ids"_a, "device_ids"_a, "direction"_a,
          nb::kw_only(), "device"_a, "stream"_a,
          "Copy checked blocks between pairs of (device base, device stride, host base, host "
          "stride, bytes of a block), on a stream.");
    m.def(
        "memory_handle",
        [](int device, std::uintptr_t address) {
            const cuda::DeviceMemory::Handle handle = cuda::memory_handle(device, address);
            return nb::bytes(handle.data(), handle.size());
        },
        "device"_a, "address"_a, "Return the handle of the allocation at an address.");
}

}  // namespace aiokv
