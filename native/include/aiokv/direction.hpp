// Which way a transfer moves bytes.
#pragma once

#include <cstdint>

namespace aiokv {

enum class Direction : std::uint8_t {
    kOnload,   // writes device blocks
    kOffload,  // writes host blocks
};

}  // namespace aiokv
