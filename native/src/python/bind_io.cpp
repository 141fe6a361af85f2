// Asynchronous file I/O.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include "aiokv/io_queue.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Output = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// Few enough that a callback of the loop ends soon.
constexpr std::size_t kPeekLimit = 4096;

std::unique_ptr<IoQueue> make_queue(std::size_t entries, std::string_view backend) {
    if (backend == "auto") return std::make_unique<IoQueue>(entries, IoBackendChoice::kAuto);
    if (backend == "io_uring") return std::make_unique<IoQueue>(entries, IoBackendChoice::kIoUring);
    if (backend == "threads") return std::make_unique<IoQueue>(entries, IoBackendChoice::kThreads);
    throw ConfigError("backend is '" + std::string(backend) +
                      "'; it must be 'auto', 'io_uring' or 'threads'");
}

std::size_t submit(IoQueue& queue, int fd, bool write, const Input<std::uint64_t>& addresses,
                   const Input<std::uint32_t>& lengths, const Input<std::uint64_t>& offsets,
                   const Input<std::uint64_t>& tags) {
    const std::size_t count = addresses.size();
    if (lengths.size() != count || offsets.size() != count || tags.size() != count) {
        throw UsageError("submit: " + std::to_string(count) + " addresses, " +
                         std::to_string(lengths.size()) + " lengths, " +
                         std::to_string(offsets.size()) + " offsets and " +
                         std::to_string(tags.size()) + " tags; their numbers must be equal");
    }
    std::vector<IoRequest> requests;
    requests.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        requests.push_back({.fd = fd,
                            .operation = write ? IoOperation::kWrite : IoOperation::kRead,
                            .length = lengths.data()[i],
                            .address = addresses.data()[i],
                            .offset = offsets.data()[i],
                            .tag = tags.data()[i]});
    }
    queue.submit(requests);
    return count;
}

template <class T>
Output<T> array_of(std::vector<T> values) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned,
                      [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
    return Output<T>(owned->data(), {owned->size()}, owner);
}

using Results = std::tuple<Output<std::uint64_t>, Output<std::int32_t>>;

Results peek(const IoQueue& queue, std::size_t limit) {
    std::vector<std::uint64_t> tags;
    std::vector<std::int32_t> results;
    for (const auto& one : queue.peek(limit)) {
        tags.push_back(one.tag);
        results.push_back(one.result);
    }
    return {array_of(std::move(tags)), array_of(std::move(results))};
}

}  // namespace

void bind_io(nb::module_& m) {
    nb::class_<IoQueue>(m, "IoQueue",
                        "Reads and writes of files that end asynchronously, announced by an "
                        "eventfd.")
        .def(nb::new_(&make_queue), "entries"_a = 64, "backend"_a = "auto",
             "At most `entries` requests are in the kernel at a time. backend: 'auto', 'io_uring' "
             "or 'threads'.")
        .def_prop_ro("backend", &IoQueue::backend, "'io_uring' or 'threads'.")
        .def_prop_ro("reason", &IoQueue::reason, "Why io_uring is not used; '' when it is.")
        .def_prop_ro("fd", &IoQueue::fd,
                     "The eventfd: readable from the end of the last request of a submit() until "
                     "pop() has removed all results; -1 when closed.")
        .def_prop_ro("pending", &IoQueue::pending, "Requests whose results were not removed.")
        .def("register_buffer", &IoQueue::register_buffer, "address"_a, "num_bytes"_a, "tag"_a,
             "Let the kernel map memory once for all later requests. The result, with the tag, is "
             "0, or the -errno with which it refused: requests are then slower.")
        .def("submit", &submit, "fd"_a, "write"_a, "addresses"_a, "lengths"_a, "offsets"_a,
             "tags"_a,
             "Start one request per element and return their number. Raises LayoutError, before "
             "the first one starts, on a request that is too long, or that is not aligned for a "
             "file with O_DIRECT.")
        .def(
            "flush",
            [](IoQueue& queue, int fd, std::uint64_t tag) {
                const IoRequest request{.fd = fd, .operation = IoOperation::kFlush, .tag = tag};
                queue.submit({&request, 1});
            },
            "fd"_a, "tag"_a, "Start an fdatasync of the file.")
        .def(
            "cancel",
            [](IoQueue& queue, const Input<std::uint64_t>& tags) {
                queue.cancel({tags.data(), tags.size()});
            },
            "tags"_a,
            "Ask to end requests early. Each still has a result: -ECANCELED when it was cancelled "
            "in time.")
        .def("peek", &peek, "limit"_a = kPeekLimit,
             "Return the oldest results, (tags, results), and keep them. A result is the number of "
             "bytes (fewer than requested: the file ended), 0 for a flush, or -errno.")
        .def("pop", &IoQueue::pop, "count"_a, "Remove the oldest results.")
        .def(
            "reap",
            [](IoQueue& queue) {
                Results results = peek(queue, kPeekLimit);
                queue.pop(std::get<0>(results).size());
                return results;
            },
            "Return results as peek() does, and remove them.")
        .def("close", &IoQueue::close, nb::call_guard<nb::gil_scoped_release>(),
             "Cancel the requests that have not started, and block until the kernel accesses no "
             "memory of the others. Results can be read afterwards. Idempotent.");
}

}  // namespace aiokv
