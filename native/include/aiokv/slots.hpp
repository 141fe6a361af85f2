// Copies of recurrent-state slots within device memory that the CPU can access.
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

// Queues copies on `stream`: slot targets[i] becomes a copy of slot sources[i], or zeros where that
// is kZeros. One event is done when all copies are. `after` works as in copy_blocks(). Throws
// UsageError as check_ids() of ids.hpp does.
std::shared_ptr<CopyJob> move_slots(Stream& stream, std::vector<SlotPiece> pieces,
                                    std::int64_t num_slots, std::span<const std::int32_t> sources,
                                    std::span<const std::int32_t> targets,
                                    std::shared_ptr<Event> after = nullptr);

}  // namespace aiokv
