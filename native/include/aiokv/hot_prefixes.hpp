// The prefixes with the most uses, found by a walk of bounded length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "aiokv/index.hpp"

namespace aiokv {

// A stretch of equally often used blocks without a fork.
struct HotPrefix {
    static constexpr std::size_t kNoParent = ~std::size_t{0};

    std::size_t parent = kNoParent;  // index of the stretch before it in the same list
    NodeId node = kNone;             // its first block
    std::string_view context;
    std::uint32_t first_block = 0;  // index in the prompt
    std::uint32_t blocks = 0;
    std::uint32_t device_blocks = 0;  // blocks with a device copy
    std::uint32_t host_blocks = 0;
    std::uint32_t uses = 0;      // saturates at 255
    std::uint32_t refs = 0;      // leases that hold its first block
    std::uint32_t children = 0;  // number of stretches that follow
};

struct HotPrefixes {
    std::vector<HotPrefix> prefixes;  // most uses first; a stretch comes after its parent
    bool complete = true;             // false: the walk has ended before it saw the whole tree
};

// Returns at most `limit` stretches. Nearly all blocks have at most the uses of their parents, so a
// walk from the roots that always continues at the most used block finds the hottest prefixes
// first. The walk reads a bounded number of blocks, and of a fork with very many children only
// some.
HotPrefixes hottest_prefixes(const Index& index, std::size_t limit);

}  // namespace aiokv
