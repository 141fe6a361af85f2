// Which way each group of layers goes. Costs were measured on an H100 behind PCIe 5 x16; on slower
// links the fixed costs weigh less, so the choice errs towards the kernel, which is never slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/cuda_layout.hpp"

namespace aiokv::cuda {

enum class Path : std::uint8_t {
    kAuto,    // the planner's choice
    kStaged,  // copy engine, staging ring, scatter or gather
    kDirect,  // a kernel reads the host blocks; onload only
};

struct Group {
    std::uint32_t first_layer;
    std::uint32_t end_layer;
    Path path;
};

struct PlannerOptions {
    // A strided copy costs 3.5 us besides its bytes. The kernel reaches 0.92 of the link's
    // bandwidth, but 0.76 while offloads run, when copy engines reach 0.95: so layers of 2 MiB or
    // more use the copy engines.
    std::size_t min_strided_copy_bytes = std::size_t{2} << 20;
    // In a batch, copies of 64 KiB are already faster than the kernel. Below that, the kernel is
    // used; its first layer also arrives earlier.
    std::size_t min_batched_copy_bytes = std::size_t{64} << 10;
    std::size_t min_lone_layer_copy_bytes = std::size_t{256} << 10;
    // Each copy of a batch costs the submitting thread 0.5 us: 10 ms for 2 GiB in copies of this
    // size.
    std::size_t bytes_per_batched_copy = std::size_t{112} << 10;
    // Runs of fewer rows are copied in a batch, longer ones by one strided copy each.
    std::size_t min_strided_rows = 8;
    // Most layers per group: larger groups need fewer calls, but their first layers become usable
    // later.
    std::uint32_t max_group_layers = 8;
};

struct Shape {
    std::size_t num_blocks;
    std::size_t num_runs;  // runs of consecutive host ids, after sorting
};

// Sets `order` to the positions of `ids` in ascending order of id; equal ids keep their order.
void sort_by_id(std::span<const std::int32_t> ids, std::vector<std::uint32_t>& order);

std::size_t count_runs(std::span<const std::int32_t> sorted_ids);

// Returns groups of 1, 1, 2, 4, 8, 8, ... layers: the first layer arrives early, and most bytes
// move in large pieces. A row of a group fits in a ring slot, unless the group is a single layer.
std::vector<Group> plan_onload(const Layout& layout, Shape shape, std::size_t slot_bytes,
                               const PlannerOptions& options, Path forced);

// Returns groups with as many layers each as fit in a ring slot, because the longest copies are
// those of whole blocks.
std::vector<Group> plan_offload(const Layout& layout, std::size_t slot_bytes);

}  // namespace aiokv::cuda
