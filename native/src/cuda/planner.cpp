#include "aiokv/cuda_planner.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace aiokv::cuda {
namespace {

bool is_scattered(Shape shape, const PlannerOptions& options) {
    return shape.num_blocks < options.min_strided_rows * std::max<std::size_t>(shape.num_runs, 1);
}

Path choose(std::size_t row_bytes, std::uint32_t num_layers, Shape shape,
            const PlannerOptions& options) {
    if (is_scattered(shape, options)) {
        const std::size_t least =
            num_layers == 1 ? options.min_lone_layer_copy_bytes : options.min_batched_copy_bytes;
        return row_bytes >= least ? Path::kStaged : Path::kDirect;
    }
    const std::size_t rows = shape.num_blocks / std::max<std::size_t>(shape.num_runs, 1);
    return rows * row_bytes >= options.min_strided_copy_bytes ? Path::kStaged : Path::kDirect;
}

std::uint32_t fitting(const Layout& layout, std::uint32_t first, std::uint32_t want,
                      std::size_t slot_bytes) {
    std::uint32_t end = std::min(first + want, layout.num_layers());
    while (end > first + 1 && layout.window(first, end).bytes > slot_bytes) {
        --end;
    }
    return end;
}

// Limits the copies in batches to the number that the thread has time for. The last groups have the
// longest copies, so the first groups are copied by the kernel.
void limit_batches(std::vector<Group>& groups, const Layout& layout,
                   const PlannerOptions& options) {
    std::size_t left = layout.host_bytes() / options.bytes_per_batched_copy;
    for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
        if (group->path != Path::kStaged) continue;
        if (left == 0) {
            group->path = Path::kDirect;
        } else {
            --left;
        }
    }
}

}  // namespace

// A radix sort, because every transfer waits for it: a comparison sort takes eight times as long.
void sort_by_id(std::span<const std::int32_t> ids, std::vector<std::uint32_t>& order) {
    constexpr std::uint32_t kBits = 11, kBuckets = 1u << kBits;
    order.resize(ids.size());
    std::iota(order.begin(), order.end(), 0u);
    if (std::is_sorted(ids.begin(), ids.end())) {
        return;
    }
    const auto largest = static_cast<std::uint32_t>(*std::max_element(ids.begin(), ids.end()));
    std::vector<std::uint32_t> next(ids.size());
    for (std::uint32_t shift = 0; shift < 32 && (largest >> shift) != 0; shift += kBits) {
        std::array<std::uint32_t, kBuckets + 1> begin{};
        for (const std::int32_t id : ids) {
            ++begin[((static_cast<std::uint32_t>(id) >> shift) % kBuckets) + 1];
        }
        for (std::uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
            begin[bucket + 1] += begin[bucket];
        }
        for (const std::uint32_t at : order) {
            next[begin[(static_cast<std::uint32_t>(ids[at]) >> shift) % kBuckets]++] = at;
        }
        order.swap(next);
    }
}

std::size_t count_runs(std::span<const std::int32_t> ids) {
    std::size_t runs = ids.empty() ? 0 : 1;
    for (std::size_t i = 1; i < ids.size(); ++i) {
        runs += ids[i] != ids[i - 1] + 1;
    }
    return runs;
}

std::vector<Group> plan_onload(const Layout& layout, Shape shape, std::size_t slot_bytes,
                               const PlannerOptions& options, Path forced) {
    std::vector<Group> groups;
    std::uint32_t want = 1;
    for (std::uint32_t first = 0; first < layout.num_layers();) {
        const std::uint32_t end = fitting(layout, first, want, slot_bytes);
        const std::size_t row_bytes = layout.window(first, end).bytes;
        groups.push_back(
            {first, end,
             forced == Path::kAuto ? choose(row_bytes, end - first, shape, options) : forced});
        if (groups.size() > 1) {
            want = std::min(want * 2, options.max_group_layers);
        }
        first = end;
    }
    if (forced == Path::kAuto && is_scattered(shape, options)) {
        limit_batches(groups, layout, options);
    }
    return groups;
}

std::vector<Group> plan_offload(const Layout& layout, std::size_t slot_bytes) {
    std::vector<Group> groups;
    for (std::uint32_t first = 0; first < layout.num_layers();) {
        const std::uint32_t end = fitting(layout, first, layout.num_layers(), slot_bytes);
        groups.push_back({first, end, Path::kStaged});
        first = end;
    }
    return groups;
}

}  // namespace aiokv::cuda
