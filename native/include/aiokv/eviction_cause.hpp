// Why blocks leave a tier, for statistics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

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

using CountByName = std::map<std::string, std::uint64_t>;

inline std::uint64_t total(const CountByName& counts) {
    std::uint64_t sum = 0;
    for (const auto& [name, count] : counts) sum += count;
    return sum;
}

// Numbers of blocks by cause.
class EvictionCounts {
  public:
    void add(EvictionCause cause, std::uint64_t blocks) {
        counts_[static_cast<std::size_t>(cause)] += blocks;
    }
    CountByName by_name() const {
        CountByName named;
        for (std::size_t i = 0; i < kEvictionCauses; ++i) {
            named[name_of(static_cast<EvictionCause>(i))] = counts_[i];
        }
        return named;
    }

  private:
    std::array<std::uint64_t, kEvictionCauses> counts_{};
};

}  // namespace aiokv
