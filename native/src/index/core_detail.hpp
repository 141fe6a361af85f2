// Small functions that the components of Core share.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "aiokv/core_types.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

constexpr std::uint32_t kMaxBlocks = 1u << 30;
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

inline std::string str(std::uint64_t value) {
    return std::to_string(value);
}

inline UsageError resize_refused(std::uint32_t from, std::uint32_t to, BlockId block,
                                 const char* why) {
    UsageError error("cannot resize the device pool from " + str(from) + " to " + str(to) +
                     " blocks: block " + std::to_string(block) + " is " + why);
    return error.field("device_blocks").hint("resize again when its lease or its copy has ended");
}

}  // namespace aiokv
