// Slots of recurrent state, copied and zeroed within device memory that is plain memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "aiokv/copy.hpp"

namespace aiokv {

// One tensor: the bytes of slot s are at base + s * stride.
struct SlotPiece {
    std::uintptr_t base = 0;
    std::size_t stride = 0;
    std::size_t bytes = 0;
};

// Queues on `stream`: slot targets[i] becomes a copy of sources[i], or zeros where that is -1. One
// event for all; order and failure of `after` as in copy_blocks(). Throws UsageError when the lists
// are empty or of unequal lengths, an id is not in [0, num_slots), or a target is named twice or is
// a source as well.
std::shared_ptr<CopyJob> move_slots(Stream& stream, std::vector<SlotPiece> pieces,
                                    std::int64_t num_slots, std::span<const std::int32_t> sources,
                                    std::span<const std::int32_t> targets,
                                    std::shared_ptr<Event> after = nullptr);

}  // namespace aiokv
