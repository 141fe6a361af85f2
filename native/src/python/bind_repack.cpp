// Strided copies between two layouts of the same blocks.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "aiokv/repack.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {
namespace {

using PartArray = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using AxisTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;
using RowsTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using Pairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
using GroupTuple =
    std::tuple<std::uint64_t, std::vector<AxisTuple>, std::uint64_t, RowsTuple, RowsTuple, Pairs>;

static_assert(sizeof(RepackPart) == 5 * sizeof(std::int64_t));

RepackRows rows_of(const RowsTuple& tuple) {
    const auto& [length, inner, outer_stride, inner_stride] = tuple;
    return {length, inner, outer_stride, inner_stride};
}

RepackGroup group_of(const GroupTuple& tuple) {
    const auto& [item_bytes, axes, row_tokens, source_rows, target_rows, pieces] = tuple;
    RepackGroup group;
    group.item_bytes = item_bytes;
    for (const auto& [length, source, target] : axes)
        group.axes.push_back({length, source, target});
    group.row_tokens = row_tokens;
    group.source_rows = rows_of(source_rows);
    group.target_rows = rows_of(target_rows);
    for (const auto& [source, target] : pieces) group.pieces.push_back({source, target});
    return group;
}

void make(Repack* self, const std::vector<GroupTuple>& tuples, const Pairs& gap_pairs,
          std::uint64_t source_bytes, std::uint64_t target_bytes) {
    std::vector<RepackGroup> groups;
    for (const GroupTuple& tuple : tuples) groups.push_back(group_of(tuple));
    std::vector<RepackGap> gaps;
    for (const auto& [offset, bytes] : gap_pairs) gaps.push_back({offset, bytes});
    new (self) Repack(std::move(groups), std::move(gaps), source_bytes, target_bytes);
}

void run(const Repack& repack, const PartArray& parts) {
    const auto* data = reinterpret_cast<const RepackPart*>(parts.data());
    nb::gil_scoped_release released;
    repack.run({data, parts.shape(0)});
}

}  // namespace

void bind_repack(nb::module_& m) {
    nb::class_<Repack>(
        m, "Repack",
        "Strided copies between two layouts of the same blocks. Immutable, thread-safe.")
        .def("__init__", &make, "groups"_a, "gaps"_a, nb::kw_only(), "source_bytes"_a,
             "target_bytes"_a,
             "Groups of pieces of equal geometry: (item bytes, axes as (length, source stride, "
             "target stride), tokens per row or 0, rows of the source and rows of the target as "
             "(length, inner length, outer stride, inner stride), pieces as (source offset, target "
             "offset)), all in bytes; and gaps of the target, (offset, bytes), which become zero. "
             "Raises LayoutError when a piece exceeds the block of either side.")
        .def("run", &run, "parts"_a.noconvert(),
             "Copy parts, rows of int64 (source address, target address, first token in the "
             "source, first token in the target, tokens). Call it in a thread: it releases the "
             "GIL. Raises UsageError before the first access. The addresses are not checked.");
}

}  // namespace aiokv
