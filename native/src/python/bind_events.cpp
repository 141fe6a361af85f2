// Streams of block events: runs of consecutive blocks as tuples of bytes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "aiokv/core.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

// (event, medium, parent, digests, tokens, context, item keys)
using RunTuple = nb::typed<nb::tuple, BlockEvent, Medium, std::optional<nb::bytes>, nb::bytes,
                           nb::bytes, std::string, std::vector<nb::bytes>>;

// Closes its stream when it is destroyed; Python keeps the core until then.
class EventStream {
  public:
    EventStream(Core& core, std::size_t max_blocks, bool with_stores)
        : core_(core), id_(core.events().open(max_blocks, with_stores)) {}
    ~EventStream() { core_.events().close(id_); }
    EventStream(const EventStream&) = delete;
    EventStream& operator=(const EventStream&) = delete;

    bool is_due() const { return core_.events().is_due(id_); }
    void repeat() { core_.events().repeat(id_); }
    EventCounts counts() const { return core_.events().counts(id_); }
    std::vector<RunTuple> drain(std::size_t max_blocks) {
        std::vector<RunTuple> tuples;
        for (const BlockRun& run : core_.events().drain(id_, max_blocks)) {
            std::optional<nb::bytes> parent;
            if (run.has_parent) parent.emplace(run.parent.data(), run.parent.size());
            std::vector<nb::bytes> items;
            for (const std::string& key : run.items) items.emplace_back(key.data(), key.size());
            tuples.push_back(nb::make_tuple(
                run.event, run.medium, parent,
                nb::bytes(run.digests.data(), run.digests.size() * sizeof(Digest)),
                nb::bytes(run.tokens.data(), run.tokens.size() * sizeof(std::int32_t)), run.context,
                items));
        }
        return tuples;
    }

  private:
    Core& core_;
    EventStreamId id_;
};

}  // namespace

void bind_events(nb::module_& m) {
    nb::enum_<BlockEvent>(m, "BlockEvent")
        .value("STORED", BlockEvent::kStored, "Copies have become valid.")
        .value("REMOVED", BlockEvent::kRemoved, "Copies are gone, or cannot be matched.")
        .value("CLEARED", BlockEvent::kCleared, "No block is on any medium.");
    nb::enum_<Medium>(m, "Medium")
        .value("DEVICE", Medium::kDevice)
        .value("HOST", Medium::kHost)
        .value("STORE", Medium::kStore, "Reported by streams with_stores only.");
    nb::class_<EventStream>(
        m, "EventStream",
        "Contents of the tiers, then each change; after an overflow, the contents again.")
        .def(nb::init<Core&, std::size_t, bool>(), "core"_a, "max_blocks"_a,
             "with_stores"_a = false, nb::keep_alive<1, 2>())
        .def_prop_ro("is_due", &EventStream::is_due,
                     "True if drain() has or seeks events; False: all is reported.")
        .def("drain", &EventStream::drain, "max_blocks"_a,
             "Return the next events, of about max_blocks blocks: (event, medium, digest of the "
             "block before them or None, 32 bytes per block, int32 tokens, context, item key of "
             "each block or nothing).")
        .def("repeat", &EventStream::repeat, "Report all existing blocks once more.")
        .def_prop_ro(
            "dropped_blocks", [](const EventStream& s) { return s.counts().dropped_blocks; },
            "Events of blocks that a full queue has dropped.")
        .def_prop_ro(
            "restarts", [](const EventStream& s) { return s.counts().restarts; },
            "Times that the queue was full.");
}

}  // namespace aiokv
