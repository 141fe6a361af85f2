// Checks of the block ids of a copy.
#pragma once

#include <cstdint>
#include <span>

namespace aiokv {

// A pool of blocks: "device" and "host" blocks, slots of recurrent "state".
struct IdPool {
    const char* block_name = "";  // name in messages, such as "host block"
    std::int64_t num_blocks = 0;
};

// Source id of a target that is filled with zeros.
constexpr std::int32_t kZeros = -1;

// The ids of one copy. Both lists have the same length.
struct CopyIds {
    std::span<const std::int32_t> sources;
    std::span<const std::int32_t> targets;
    bool zeros = false;      // sources may be kZeros
    bool same_pool = false;  // a target must not be a source
};

// Throws UsageError on empty lists, lists of unequal lengths, ids out of range, a duplicate
// destination, and a destination that is a source of the same pool; the message has the numbers.
void check_ids(const CopyIds& ids, const IdPool& source, const IdPool& target);

}  // namespace aiokv
