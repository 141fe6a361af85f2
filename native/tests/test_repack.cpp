// Repack: orders of axes, rows in runs, offsets, and the checks of both.
#include "aiokv/repack.hpp"

#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes numbered(std::size_t size) {
    Bytes bytes(size);
    std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
    return bytes;
}

RepackPart part(const Bytes& source, Bytes& target, std::int64_t source_token,
                std::int64_t target_token, std::int64_t tokens) {
    return {static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(source.data())),
            static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target.data())),
            source_token, target_token, tokens};
}

// [tokens, 2] to [2, tokens], of items of `item` bytes and 4 tokens.
RepackGroup transposed(std::uint64_t item) {
    RepackGroup group;
    group.item_bytes = item;
    group.axes = {{2, item, 4 * item}};
    group.row_tokens = 1;
    group.source_rows = {4, 4, 0, 2 * item};
    group.target_rows = {4, 4, 0, item};
    group.pieces = {{0, 0}};
    return group;
}

}  // namespace

TEST(elements_get_the_order_of_the_target) {
    for (const std::uint64_t item : {1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 1024, 1030}) {
        const std::uint64_t size = 8 * item;
        const Repack repack({transposed(item)}, {}, size, size);
        const Bytes source = numbered(size);
        // One byte in front: addresses that are not aligned.
        Bytes target(size + 64, 0);
        RepackPart all = part(source, target, 0, 0, 4);
        all.target += 1;
        repack.run(std::vector{all});
        for (std::uint64_t token = 0; token < 4; ++token) {
            for (std::uint64_t head = 0; head < 2; ++head) {
                for (std::uint64_t byte = 0; byte < item; ++byte) {
                    CHECK(target[1 + (head * 4 + token) * item + byte] ==
                          source[(token * 2 + head) * item + byte]);
                }
            }
        }
        CHECK(target[0] == 0);
        CHECK(target[1 + size] == 0);
    }
}

TEST(a_part_copies_its_tokens_only) {
    const Repack repack({transposed(1)}, {}, 8, 8);
    const Bytes source = numbered(8);
    Bytes target(8, 99);
    repack.run(std::vector{part(source, target, 1, 2, 2)});
    CHECK((target == Bytes{99, 99, 2, 4, 99, 99, 3, 5}));
}

TEST(runs_of_rows_may_differ) {
    // The source has two runs of 3 rows, 10 bytes apart; the target three runs of 2 rows.
    RepackGroup group;
    group.item_bytes = 1;
    group.row_tokens = 2;
    group.source_rows = {6, 3, 10, 1};
    group.target_rows = {6, 2, 4, 1};
    group.pieces = {{0, 1}};
    const Repack repack({group}, {{0, 1}}, 13, 11);
    const Bytes source = numbered(13);
    Bytes target(11, 99);
    repack.run(std::vector{part(source, target, 0, 0, 12)});
    CHECK((target == Bytes{0, 0, 1, 99, 99, 2, 10, 99, 99, 11, 12}));
}

TEST(pieces_outside_a_block_are_refused) {
    const std::uint64_t huge = ~std::uint64_t{0};
    CHECK_THROWS(LayoutError, Repack({transposed(1)}, {}, 7, 8));
    CHECK_THROWS(LayoutError, Repack({transposed(1)}, {}, 8, 7));
    CHECK_THROWS(LayoutError, Repack({transposed(1)}, {{8, 1}}, 8, 8));
    RepackGroup group = transposed(1);
    group.axes[0].source_stride = huge;
    CHECK_THROWS(LayoutError, Repack({group}, {}, huge, huge));
    group = transposed(1);
    group.pieces = {{huge, 0}};
    CHECK_THROWS(LayoutError, Repack({group}, {}, huge, huge));
    group = transposed(1);
    group.axes[0].length = 0;
    CHECK_THROWS(LayoutError, Repack({group}, {}, 8, 8));
    group = transposed(1);
    group.source_rows.inner = 0;
    CHECK_THROWS(LayoutError, Repack({group}, {}, 8, 8));
    group = transposed(1);
    group.axes.assign(17, {1, 0, 0});
    CHECK_THROWS(LayoutError, Repack({group}, {}, 8, 8));
}

TEST(parts_outside_a_block_are_refused_before_the_first_copy) {
    RepackGroup group = transposed(1);
    group.row_tokens = 2;
    const Repack repack({group}, {}, 8, 8);
    const Bytes source = numbered(8);
    Bytes target(8, 99);
    const std::int64_t most = std::numeric_limits<std::int64_t>::max();
    for (const auto& [from, to, tokens] :
         {std::tuple<std::int64_t, std::int64_t, std::int64_t>{0, 0, 10},
          {2, 0, 8},
          {0, 2, 8},
          {-2, 0, 2},
          {0, -2, 2},
          {0, 0, -2},
          {1, 0, 2},
          {0, 1, 2},
          {0, 0, 1},
          {most - 1, 0, 2},
          {0, 0, most - 1}}) {
        CHECK_THROWS(UsageError, repack.run(std::vector{part(source, target, 0, 0, 8),
                                                        part(source, target, from, to, tokens)}));
    }
    CHECK((target == Bytes(8, 99)));
    repack.run(std::vector{part(source, target, 8, 8, 0)});
    CHECK((target == Bytes(8, 99)));
}
