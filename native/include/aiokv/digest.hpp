// Identity of blocks outside the process: a chain of SHA-256 digests, the same on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace aiokv {

using Digest = std::array<std::uint8_t, 32>;

// Of the empty prefix of a context.
Digest root_digest(std::uint32_t block_tokens, std::string_view context);

// Of the block behind `parent`. `items`: key bytes of the items that touch the block; empty: none.
Digest block_digest(const Digest& parent, std::span<const std::int32_t> tokens,
                    std::string_view items);

}  // namespace aiokv
