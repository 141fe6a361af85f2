// Strided copies between two layouts of the same blocks: other orders of axes, other numbers of
// tokens per block, other shares of the heads.
//
// A layout places rows (tokens, or fixed numbers of tokens) and the other axes at strides within a
// block. Pieces of equal geometry, such as the layers of a model, form one group and differ in
// their offsets only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace aiokv {

// An axis that is copied completely. Strides are in bytes.
struct RepackAxis {
    std::uint64_t length = 0;
    std::uint64_t source_stride = 0;
    std::uint64_t target_stride = 0;
};

// Rows of one side: row i begins at (i / inner) * outer_stride + (i % inner) * inner_stride bytes.
// Blocks that are made of smaller blocks have more than one run of `inner` rows.
struct RepackRows {
    std::uint64_t length = 0;
    std::uint64_t inner = 0;
    std::uint64_t outer_stride = 0;
    std::uint64_t inner_stride = 0;
};

struct RepackOffsets {
    std::uint64_t source = 0;
    std::uint64_t target = 0;
};

// Pieces with equal strides and sizes.
struct RepackGroup {
    std::uint64_t item_bytes = 0;  // contiguous on both sides
    std::vector<RepackAxis> axes;  // the axes besides the rows
    std::uint64_t row_tokens = 0;  // tokens per row; 0: no rows, each part copies all bytes
    RepackRows source_rows;
    RepackRows target_rows;
    std::vector<RepackOffsets> pieces;
};

// Bytes of the target that each part sets to zero.
struct RepackGap {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

// One copy of `tokens` tokens between a position of the block at `source` and one of the block at
// `target`.
struct RepackPart {
    std::int64_t source = 0;
    std::int64_t target = 0;
    std::int64_t source_token = 0;
    std::int64_t target_token = 0;
    std::int64_t tokens = 0;
};

// Immutable after its construction; calls of several threads may overlap.
class Repack {
  public:
    // Throws LayoutError unless all bytes of all groups lie within source_bytes and target_bytes.
    Repack(std::vector<RepackGroup> groups, std::vector<RepackGap> gaps, std::uint64_t source_bytes,
           std::uint64_t target_bytes);

    // Copies all parts, in order. Throws UsageError, before the first access, if the tokens of a
    // part are not whole rows within both blocks. The caller is responsible for the addresses.
    void run(std::span<const RepackPart> parts) const;

  private:
    void check(const RepackPart& part) const;

    std::vector<RepackGroup> groups_;
    std::vector<RepackGap> gaps_;
};

}  // namespace aiokv
