#include "aiokv/cuda_layout.hpp"
#include "aiokv/cuda_planner.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;
using namespace aiokv::cuda;

namespace {

using Ids = std::vector<std::int32_t>;

Layout make_layout(std::uint32_t num_layers, std::size_t piece_bytes) {
    Layout layout;
    layout.device_blocks = 64;
    layout.host_blocks = 64;
    layout.host_base = 1 << 20;
    layout.layer_begin.push_back(0);
    for (std::uint32_t layer = 0; layer < num_layers; ++layer) {
        for (int region = 0; region < 2; ++region) {
            layout.slices.push_back(
                {4096, piece_bytes, piece_bytes, layout.host_pitch, piece_bytes});
            layout.host_pitch += piece_bytes;
        }
        layout.layer_begin.push_back(static_cast<std::uint32_t>(layout.slices.size()));
    }
    layout.validate();
    return layout;
}

std::size_t total_bytes(const std::vector<HostCopy>& copies) {
    std::size_t total = 0;
    for (const HostCopy& copy : copies) total += copy.bytes * copy.rows;
    return total;
}

}  // namespace

TEST(windows_cover_a_block) {
    const Layout layout = make_layout(4, 64);
    CHECK_EQ(layout.window(0, 4).bytes, layout.host_pitch);
    CHECK_EQ(layout.window(1, 3).offset, 128u);
    CHECK_EQ(layout.window(1, 3).bytes, 256u);
    CHECK_EQ(layout.max_layer_bytes(), 128u);
}

TEST(a_hole_between_slices_is_refused) {
    Layout layout = make_layout(2, 64);
    layout.slices[1].host_offset += 64;
    CHECK_THROWS(LayoutError, layout.validate());
}

TEST(copies_leave_the_end_of_a_larger_pitch_alone) {
    Layout layout = make_layout(4, 64);
    layout.host_pitch = 4096;
    layout.validate();
    CHECK_EQ(layout.window(0, 4).bytes, 512u);
    CHECK_EQ(layout.window(3, 4).bytes, 128u);
    std::vector<HostCopy> copies;
    append_host_copies(layout, std::size_t{1} << 30, Ids{2, 3}, layout.window(0, 4), copies);
    CHECK_EQ(copies.size(), 1u);
    CHECK_EQ(copies[0].bytes, 512u);
    CHECK_EQ(copies[0].host_pitch, 4096u);
    layout.host_pitch = 511;
    CHECK_THROWS(LayoutError, layout.validate());
}

TEST(duplicate_destinations_are_refused_and_sources_are_not) {
    IdCheck ids(8, 8);
    CHECK_THROWS(UsageError, ids.check_onload(Ids{1, 2}, Ids{3, 3}));
    CHECK_THROWS(UsageError, ids.check_offload(Ids{3, 3}, Ids{1, 2}));
    CHECK_THROWS(UsageError, ids.check_onload(Ids{8}, Ids{0}));
    CHECK_THROWS(UsageError, ids.check_offload(Ids{0}, Ids{-1}));
    ids.check_onload(Ids{1, 1}, Ids{2, 3});
    ids.check_onload(Ids{1, 1}, Ids{2, 3});  // a second call does not see the first
}

TEST(runs_become_one_copy_each) {
    const Layout layout = make_layout(4, 64);
    std::vector<HostCopy> copies;
    append_host_copies(layout, std::size_t{1} << 30, Ids{2, 3, 4, 7, 7, 9}, layout.window(1, 2),
                       copies);
    CHECK_EQ(copies.size(), 4u);
    CHECK_EQ(copies[0].rows, 3u);
    CHECK_EQ(copies[0].host, layout.host_base + 2 * layout.host_pitch + 128);
    CHECK_EQ(copies[1].staging_offset, 3 * 128u);
    CHECK_EQ(total_bytes(copies), 6 * 128u);
}

TEST(no_copy_crosses_a_registration_border) {
    const Layout layout = make_layout(3, 64);  // 384 bytes a block
    const std::size_t chunk = 1000;            // boundaries fall into blocks
    Ids ids;
    for (int i = 0; i < 40; ++i) ids.push_back(i);
    for (const Window window : {layout.window(0, 3), layout.window(1, 2)}) {
        std::vector<HostCopy> copies;
        append_host_copies(layout, chunk, ids, window, copies);
        CHECK_EQ(total_bytes(copies), ids.size() * window.bytes);
        std::size_t staging = 0;
        for (const HostCopy& copy : copies) {
            const std::size_t first = copy.host - layout.host_base;
            const std::size_t last = first + (copy.rows - 1) * copy.host_pitch + copy.bytes - 1;
            CHECK_EQ(first / chunk, last / chunk);
            CHECK_EQ(copy.staging_offset, staging);
            staging += copy.bytes * copy.rows;
        }
    }
}

TEST(ids_are_sorted_and_equal_ones_keep_their_order) {
    const Ids ids{70000, 5, 4096, 5, 0, 2049, 70000, 1};
    std::vector<std::uint32_t> order;
    sort_by_id(ids, order);
    CHECK(order == (std::vector<std::uint32_t>{4, 7, 1, 3, 5, 2, 0, 6}));
    sort_by_id(Ids{1, 2, 3}, order);
    CHECK(order == (std::vector<std::uint32_t>{0, 1, 2}));
    sort_by_id(Ids{}, order);
    CHECK(order.empty());
}

TEST(groups_ramp_and_cover_all_layers) {
    const Layout layout = make_layout(32, 16384);
    const auto groups =
        plan_onload(layout, {2048, 32}, std::size_t{32} << 20, PlannerOptions{}, Path::kAuto);
    std::uint32_t next = 0;
    std::vector<std::uint32_t> sizes;
    for (const Group& group : groups) {
        CHECK_EQ(group.first_layer, next);
        sizes.push_back(group.end_layer - group.first_layer);
        next = group.end_layer;
    }
    CHECK_EQ(next, 32u);
    CHECK_EQ(sizes[0], 1u);
    CHECK_EQ(sizes[1], 1u);
    CHECK_EQ(sizes[2], 2u);
    CHECK(groups.back().path == Path::kStaged);
}

TEST(single_small_blocks_are_copied_by_kernel) {
    const Layout layout = make_layout(32, 1024);  // 64 KiB a block: less than a copy is worth
    for (const Group& group :
         plan_onload(layout, {512, 512}, std::size_t{64} << 20, PlannerOptions{}, Path::kAuto)) {
        CHECK(group.path == Path::kDirect);
    }
}

TEST(batches_stay_below_the_copy_limit_of_the_thread) {
    const Layout layout = make_layout(32, 4096);  // 256 KiB a block: two copies of each
    const auto groups =
        plan_onload(layout, {512, 512}, std::size_t{64} << 20, PlannerOptions{}, Path::kAuto);
    std::vector<bool> staged;
    for (const Group& group : groups) staged.push_back(group.path == Path::kStaged);
    CHECK(staged == (std::vector<bool>{false, false, false, false, false, true, true}));
    for (const Group& group :
         plan_onload(layout, {512, 512}, std::size_t{64} << 20, PlannerOptions{}, Path::kStaged)) {
        CHECK(group.path == Path::kStaged);
    }
}

TEST(groups_fit_the_slot_unless_one_layer_does_not) {
    const Layout layout = make_layout(8, 1 << 20);  // 2 MiB a layer
    for (const Group& group : plan_offload(layout, std::size_t{5} << 20)) {
        CHECK(layout.window(group.first_layer, group.end_layer).bytes <= std::size_t{5} << 20);
    }
    CHECK_EQ(plan_offload(layout, std::size_t{1} << 20).size(), 8u);
    CHECK_EQ(plan_offload(layout, std::size_t{16} << 20).size(), 1u);
}
