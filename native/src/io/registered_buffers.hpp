// RegisteredBuffers: the memory that the kernel has mapped for an io_uring, and its numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace aiokv {

class RegisteredBuffers {
  public:
    // Number of buffers, which is that of the next one.
    unsigned size() const { return static_cast<unsigned>(buffers_.size()); }

    // Adds memory that overlaps none of the others.
    void add(std::uint64_t address, std::size_t num_bytes) {
        const Buffer buffer{address, address + num_bytes, static_cast<std::uint16_t>(size())};
        buffers_.insert(behind(address), buffer);
    }

    // Returns the number of the buffer that has all of these bytes, if there is one.
    std::optional<std::uint16_t> find(std::uint64_t address, std::uint32_t length) const {
        const auto found = behind(address);
        if (found == buffers_.begin() || address + length > found[-1].end) return std::nullopt;
        return found[-1].number;
    }

  private:
    struct Buffer {
        std::uint64_t begin, end;
        std::uint16_t number;
    };

    // First buffer that begins behind an address.
    std::vector<Buffer>::const_iterator behind(std::uint64_t address) const {
        return std::ranges::upper_bound(buffers_, address, {}, &Buffer::begin);
    }

    std::vector<Buffer> buffers_;  // in order of addresses
};

}  // namespace aiokv
