// RegisteredBuffers: the memory that the kernel has mapped for an io_uring, and its numbers.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace aiokv {

class RegisteredBuffers {
  public:
    // The kernel registers at most 1 GiB as one buffer.
    static constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

    const std::vector<iovec>& iovecs() const { return pieces_; }

    // Returns the buffers together with more memory, which must not overlap them, in order of
    // addresses.
    RegisteredBuffers with(std::uint64_t address, std::size_t num_bytes) const {
        RegisteredBuffers more = *this;
        for (std::size_t begin = 0; begin < num_bytes; begin += kMaxBytes) {
            more.pieces_.push_back(
                {reinterpret_cast<void*>(address + begin), std::min(kMaxBytes, num_bytes - begin)});
        }
        std::ranges::sort(more.pieces_, {}, [](const iovec& piece) { return begin_of(piece); });
        return more;
    }

    // Returns the number of the buffer that has all of these bytes, if there is one.
    std::optional<std::uint16_t> find(std::uint64_t address, std::uint32_t length) const {
        auto behind = std::ranges::upper_bound(pieces_, address, {},
                                               [](const iovec& piece) { return begin_of(piece); });
        if (behind == pieces_.begin()) return std::nullopt;
        const iovec& piece = *--behind;
        if (address + length > begin_of(piece) + piece.iov_len) return std::nullopt;
        return static_cast<std::uint16_t>(behind - pieces_.begin());
    }

  private:
    static std::uint64_t begin_of(const iovec& piece) {
        return reinterpret_cast<std::uint64_t>(piece.iov_base);
    }

    std::vector<iovec> pieces_;
};

}  // namespace aiokv
