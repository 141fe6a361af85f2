// SHA-256 (FIPS 180-4). Uses the SHA instructions of the processor where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace aiokv {

using Digest = std::array<std::uint8_t, 32>;

// Adds whole blocks of 64 bytes to the state.
using Sha256Blocks = void (*)(std::uint32_t* state, const std::uint8_t* bytes, std::size_t blocks);

// The same for two messages at a time, which takes less time than one after the other.
using Sha256TwoMessages = void (*)(std::uint32_t* const* states, const std::uint8_t* const* bytes,
                                   std::size_t blocks);

void sha256_blocks_portable(std::uint32_t* state, const std::uint8_t* bytes, std::size_t blocks);

// The implementations with SHA instructions; null if the processor or the build target lacks them.
Sha256Blocks sha256_blocks_native();

Sha256TwoMessages sha256_two_messages_native();

// Returns the fastest implementation on this processor. It is chosen once, by cpuid.
Sha256Blocks sha256_blocks_fastest();

constexpr std::array<std::uint32_t, 8> kSha256InitialState = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

// Returns the digest of a message whose blocks, including the padding, were added to the state.
Digest sha256_digest(const std::array<std::uint32_t, 8>& state);

class Sha256 {
  public:
    explicit Sha256(Sha256Blocks add_blocks = sha256_blocks_fastest());

    void add(std::span<const std::uint8_t> bytes);
    // Returns the digest of all bytes so far. Nothing may be added afterwards.
    Digest finish();

  private:
    static constexpr std::size_t kBlockBytes = 64;

    Sha256Blocks add_blocks_;
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, kBlockBytes> buffer_;  // the first num_bytes_ % 64 bytes of a block
    std::uint64_t num_bytes_ = 0;
};

}  // namespace aiokv
