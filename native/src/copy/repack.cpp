#include "aiokv/repack.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "aiokv/cache_lines.hpp"
#include "aiokv/copy.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

namespace {

constexpr std::size_t kMaxAxes = 16;

// One loop of a copy. Strides are in bytes.
struct Loop {
    std::size_t length;
    std::size_t source_stride;
    std::size_t target_stride;
};

// Loops around runs of contiguous bytes; the outermost comes first.
struct Loops {
    std::array<Loop, kMaxAxes + 1> loops;
    std::size_t count = 0;
    std::size_t run_bytes = 0;
};

// Orders the loops by the target's strides, so that writes ascend, and merges contiguous ones.
Loops plan(const RepackGroup& group, const Loop* rows) {
    Loops planned;
    std::array<Loop, kMaxAxes + 1> loops{};
    std::size_t count = 0;
    for (const RepackAxis& axis : group.axes) {
        if (axis.length > 1) loops[count++] = {axis.length, axis.source_stride, axis.target_stride};
    }
    if (rows != nullptr && rows->length > 1) loops[count++] = *rows;
    std::sort(loops.begin(), loops.begin() + static_cast<std::ptrdiff_t>(count),
              [](const Loop& a, const Loop& b) { return a.target_stride < b.target_stride; });
    planned.run_bytes = group.item_bytes;
    // The innermost loop comes first here; the order is reversed below.
    for (std::size_t i = 0; i < count; ++i) {
        const Loop& loop = loops[i];
        if (planned.count == 0) {
            if (loop.source_stride == planned.run_bytes &&
                loop.target_stride == planned.run_bytes) {
                planned.run_bytes *= loop.length;
                continue;
            }
        } else {
            Loop& inner = planned.loops[planned.count - 1];
            if (loop.source_stride == inner.source_stride * inner.length &&
                loop.target_stride == inner.target_stride * inner.length) {
                inner.length *= loop.length;
                continue;
            }
        }
        planned.loops[planned.count++] = loop;
    }
    std::reverse(planned.loops.begin(),
                 planned.loops.begin() + static_cast<std::ptrdiff_t>(planned.count));
    return planned;
}

// The compiler turns copies of a constant number of bytes into wide loads and stores.
template <std::size_t kBytes>
void copy_fixed(char* to, const char* from, const Loop& loop, std::size_t /*bytes*/) {
    for (std::size_t i = 0; i < loop.length; ++i) {
        std::memcpy(to, from, kBytes);
        to += loop.target_stride;
        from += loop.source_stride;
    }
}

// Copies whole cache lines to aligned addresses. Prefetches the next run of the source, because the
// processor does not prefetch across gaps.
void copy_lines(char* to, const char* from, const Loop& loop, std::size_t bytes) {
    for (std::size_t i = 0; i < loop.length; ++i) {
        const char* next = from + loop.source_stride;
        for (std::size_t j = 0; j < bytes; j += kLineBytes) {
            prefetch_line(next + j);
            stream_line(to + j, from + j);
        }
        to += loop.target_stride;
        from = next;
    }
}

void copy_any(char* to, const char* from, const Loop& loop, std::size_t bytes) {
    for (std::size_t i = 0; i < loop.length; ++i) {
        copy_bytes(to, from, bytes, true);
        to += loop.target_stride;
        from += loop.source_stride;
    }
}

using CopyRuns = void (*)(char*, const char*, const Loop&, std::size_t);

// Returns true if all runs are whole cache lines of the target.
bool has_whole_lines(const Loops& planned, const char* target) {
    bool whole = planned.run_bytes % kLineBytes == 0 && is_line_aligned(target);
    for (std::size_t i = 0; i < planned.count; ++i) {
        whole = whole && planned.loops[i].target_stride % kLineBytes == 0;
    }
    return whole;
}

CopyRuns copier(const Loops& planned, const char* target) {
    if (planned.count > 0 && has_whole_lines(planned, target)) return copy_lines;
    switch (planned.run_bytes) {
        case 1:
            return copy_fixed<1>;
        case 2:
            return copy_fixed<2>;
        case 4:
            return copy_fixed<4>;
        case 8:
            return copy_fixed<8>;
        case 16:
            return copy_fixed<16>;
        case 32:
            return copy_fixed<32>;
        default:
            return copy_any;
    }
}

void copy_loops(const Loops& planned, CopyRuns copy, std::size_t depth, char* to,
                const char* from) {
    if (depth + 1 == planned.count) {
        copy(to, from, planned.loops[depth], planned.run_bytes);
        return;
    }
    const Loop& loop = planned.loops[depth];
    for (std::size_t i = 0; i < loop.length; ++i) {
        copy_loops(planned, copy, depth + 1, to, from);
        to += loop.target_stride;
        from += loop.source_stride;
    }
}

// Copies all pieces of a group from and to addresses of one box.
void copy_pieces(const RepackGroup& group, const Loops& planned, char* target, const char* source) {
    for (const RepackOffsets& piece : group.pieces) {
        char* to = target + piece.target;
        const char* from = source + piece.source;
        if (planned.count == 0) {
            copy_bytes(to, from, planned.run_bytes, true);
        } else {
            copy_loops(planned, copier(planned, to), 0, to, from);
        }
    }
}

std::uint64_t row_offset(const RepackRows& rows, std::uint64_t row) {
    return row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
}

// Returns the number of rows from `row` on at equal strides, at most `limit`.
std::uint64_t equal_rows(const RepackRows& rows, std::uint64_t row, std::uint64_t limit) {
    return std::min(limit, rows.inner - row % rows.inner);
}

void copy_rows(const RepackGroup& group, const RepackPart& part, char* target, const char* source) {
    std::uint64_t from = static_cast<std::uint64_t>(part.source_token) / group.row_tokens;
    std::uint64_t to = static_cast<std::uint64_t>(part.target_token) / group.row_tokens;
    std::uint64_t left = static_cast<std::uint64_t>(part.tokens) / group.row_tokens;
    while (left > 0) {
        std::uint64_t count = equal_rows(group.source_rows, from, left);
        count = equal_rows(group.target_rows, to, count);
        const Loop rows = {count, group.source_rows.inner_stride, group.target_rows.inner_stride};
        copy_pieces(group, plan(group, &rows), target + row_offset(group.target_rows, to),
                    source + row_offset(group.source_rows, from));
        from += count;
        to += count;
        left -= count;
    }
}

// Adds (length - 1) * stride to `bytes`. Throws LayoutError if the result does not fit in 64 bits.
void add_extent(std::uint64_t& bytes, std::uint64_t length, std::uint64_t stride) {
    std::uint64_t extent = 0;
    if (length == 0 || __builtin_mul_overflow(length - 1, stride, &extent) ||
        __builtin_add_overflow(bytes, extent, &bytes)) {
        throw LayoutError("repack: an axis of " + std::to_string(length) + " elements of " +
                          std::to_string(stride) + " bytes has no size in 64 bits");
    }
}

void add_rows(std::uint64_t& bytes, const RepackRows& rows, std::uint64_t row_tokens) {
    std::uint64_t tokens = 0;
    if (rows.length == 0 || rows.inner == 0 ||
        __builtin_mul_overflow(rows.length, row_tokens, &tokens)) {
        throw LayoutError("repack: a block of " + std::to_string(rows.length) +
                          " rows in runs of " + std::to_string(rows.inner) + ", " +
                          std::to_string(row_tokens) + " tokens per row");
    }
    add_extent(bytes, (rows.length + rows.inner - 1) / rows.inner, rows.outer_stride);
    add_extent(bytes, std::min(rows.length, rows.inner), rows.inner_stride);
}

void check_end(const char* side, std::uint64_t offset, std::uint64_t extent, std::uint64_t limit) {
    std::uint64_t end = 0;
    if (__builtin_add_overflow(offset, extent, &end) || end > limit) {
        throw LayoutError("repack: a piece of " + std::to_string(extent) + " bytes at " +
                          std::to_string(offset) + " exceeds the " + std::to_string(limit) +
                          " bytes of the " + side);
    }
}

void check_group(const RepackGroup& group, std::uint64_t source_bytes, std::uint64_t target_bytes) {
    if (group.axes.size() > kMaxAxes) {
        throw LayoutError("repack: " + std::to_string(group.axes.size()) + " axes; at most " +
                          std::to_string(kMaxAxes));
    }
    std::uint64_t source = group.item_bytes;
    std::uint64_t target = group.item_bytes;
    for (const RepackAxis& axis : group.axes) {
        add_extent(source, axis.length, axis.source_stride);
        add_extent(target, axis.length, axis.target_stride);
    }
    if (group.row_tokens > 0) {
        add_rows(source, group.source_rows, group.row_tokens);
        add_rows(target, group.target_rows, group.row_tokens);
    }
    for (const RepackOffsets& piece : group.pieces) {
        check_end("source", piece.source, source, source_bytes);
        check_end("target", piece.target, target, target_bytes);
    }
}

void check_rows(const char* side, std::int64_t token, std::int64_t tokens, const RepackRows& rows,
                std::uint64_t row_tokens) {
    const auto first = static_cast<std::uint64_t>(token);
    const auto count = static_cast<std::uint64_t>(tokens);
    const std::uint64_t block_tokens = rows.length * row_tokens;
    if (token < 0 || tokens < 0 || first > block_tokens || count > block_tokens - first ||
        first % row_tokens != 0 || count % row_tokens != 0) {
        throw UsageError("repack: " + std::to_string(tokens) + " tokens from token " +
                         std::to_string(token) + " on are not whole rows of " +
                         std::to_string(row_tokens) + " tokens of a " + side + " block of " +
                         std::to_string(block_tokens));
    }
}

}  // namespace

Repack::Repack(std::vector<RepackGroup> groups, std::vector<RepackGap> gaps,
               std::uint64_t source_bytes, std::uint64_t target_bytes)
    : groups_(std::move(groups)), gaps_(std::move(gaps)) {
    for (const RepackGroup& group : groups_) check_group(group, source_bytes, target_bytes);
    for (const RepackGap& gap : gaps_) check_end("target", gap.offset, gap.bytes, target_bytes);
}

void Repack::check(const RepackPart& part) const {
    for (const RepackGroup& group : groups_) {
        if (group.row_tokens == 0) continue;
        check_rows("source", part.source_token, part.tokens, group.source_rows, group.row_tokens);
        check_rows("target", part.target_token, part.tokens, group.target_rows, group.row_tokens);
    }
}

void Repack::run(std::span<const RepackPart> parts) const {
    for (const RepackPart& part : parts) check(part);
    for (const RepackPart& part : parts) {
        const auto* source = reinterpret_cast<const char*>(part.source);
        auto* target = reinterpret_cast<char*>(part.target);
        for (const RepackGap& gap : gaps_) std::memset(target + gap.offset, 0, gap.bytes);
        for (const RepackGroup& group : groups_) {
            if (group.row_tokens == 0) {
                copy_pieces(group, plan(group, nullptr), target, source);
            } else {
                copy_rows(group, part, target, source);
            }
        }
    }
    streaming_fence();
}

}  // namespace aiokv
