// A checksum of 128 bits that runs at the speed of memory without instructions beyond x86-64.
//
// The bytes are read as little-endian words of 64 bits; the last pair of words is filled up with
// zeros. Chunks of 1,024 bytes are compressed by NH (Black, Halevi, Krawczyk, Krovetz and Rogaway:
// "UMAC: Fast and Secure Message Authentication", 1999), and the chunks are combined by a
// polynomial:
//
//   nh(chunk) = sum over its pairs of words of (w[2i] + k[2i]) * (w[2i+1] + k[2i+1]), where the
//               additions are mod 2^64, and products and sum are mod 2^128
//   sum       = 0; for each chunk: sum = (sum * K + nh(chunk)) mod 2^127 - 1
//
// k and K come from SHA-256("aiokv checksum 1\0" | u32 i), i = 0, 1, ...: 128 words k, and then 127
// bits K (the low bits of the next 16 bytes). Of two different inputs of the same length, the sums
// are equal for at most 2^-61 of all choices of k and K. So the checksum detects accidental
// damage; it does not stop an attacker, who knows k and K.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace aiokv {

class Checksum {
  public:
    static constexpr std::size_t kBytes = 16;
    static constexpr std::size_t kChunkBytes = 1024;

    // Adds chunks. Each call begins a new chunk, so the sum depends on the ends of the calls.
    void add(std::span<const std::uint8_t> bytes);
    // Copies bytes, by stores that bypass the caches where `to` begins a cache line, and adds the
    // copy as add() does: in the time of a memcpy, or less. Others may write to `bytes` meanwhile.
    // Call streaming_fence() before another thread is told of the copy.
    void add_and_copy(std::span<const std::uint8_t> bytes, std::uint8_t* to);
    // The sum of all chunks so far, little-endian.
    std::array<std::uint8_t, kBytes> value() const;

  private:
    void add_chunk(unsigned __int128 nh);

    unsigned __int128 sum_ = 0;
};

// k and K above.
struct ChecksumConstants {
    std::array<std::uint64_t, Checksum::kChunkBytes / 8> words;
    unsigned __int128 factor;
};

const ChecksumConstants& checksum_constants();

}  // namespace aiokv
