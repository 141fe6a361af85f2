// Why blocks leave a tier, for statistics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace aiokv {

enum class EvictionCause : std::uint8_t {
    kCapacity,  // a lease, a host copy or a fetch needed room
    kRequest,   // the application has called evict()
    kResize,
    kSleep,
    kReset,
    kFailure,  // a copy failed, or was cancelled while a lease used it
};
constexpr std::size_t kEvictionCauses = 6;

const char* name_of(EvictionCause cause);

// Numbers of blocks by cause.
class EvictionCounts {
  public:
    void add(EvictionCause cause, std::uint64_t blocks) {
        counts_[static_cast<std::size_t>(cause)] += blocks;
    }
    std::uint64_t of(EvictionCause cause) const { return counts_[static_cast<std::size_t>(cause)]; }
    std::uint64_t total() const {
        std::uint64_t sum = 0;
        for (const std::uint64_t count : counts_) sum += count;
        return sum;
    }

  private:
    std::array<std::uint64_t, kEvictionCauses> counts_{};
};

}  // namespace aiokv
