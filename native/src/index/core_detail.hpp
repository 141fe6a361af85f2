// Small things that the parts of Core share.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "aiokv/core.hpp"

namespace aiokv {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

inline std::string str(std::uint64_t value) {
    return std::to_string(value);
}

inline ItemKey key_of(const std::vector<ItemKey>& keys, std::size_t block) {
    return block < keys.size() ? keys[block] : kNoItems;
}

}  // namespace aiokv
