// The trailer of an object in a store: it proves which block the bytes before it are.
//
//   offset 0   u32       magic "aikv"
//   offset 4   u32       version, 1
//   offset 8   u64       bytes of the payload
//   offset 16  32 bytes  key of the block
//   offset 48  16 bytes  checksum of the payload, and then of the 48 bytes above
//
// Numbers are little-endian. The trailer follows the payload without a gap.
#pragma once

#include <cstdint>
#include <span>

#include "aiokv/digest.hpp"

namespace aiokv {

constexpr std::size_t kTrailerBytes = 64;
constexpr std::uint32_t kTrailerMagic = 0x766b6961;  // "aikv"
constexpr std::uint32_t kTrailerVersion = 1;

// Results of keys that these functions give; the values are those of aiokv.stores.Result.
enum class StoreResult : std::uint8_t { kDone = 0, kWrong = 2 };

// Host blocks that hold objects; block i begins at address + i * pitch_bytes.
struct ObjectBlocks {
    std::uint8_t* address;
    std::uint64_t num_blocks;
    std::uint64_t pitch_bytes;
    std::uint64_t payload_bytes;

    // Throws UsageError if a block does not fit in its pitch, or the blocks not in the address
    // space.
    void check() const;
    std::span<std::uint8_t> object(std::int32_t block) const {
        return {address + static_cast<std::uint64_t>(block) * pitch_bytes,
                payload_bytes + kTrailerBytes};
    }
};

// Writes the trailer at the end of an object; the payload is the rest.
void seal_object(std::span<std::uint8_t> object, const Digest& key);

// True if the object ends with the trailer of this key, of its length, and of its payload.
bool verify_object(std::span<const std::uint8_t> object, const Digest& key);

// Seal or verify the objects in `ids`; keys are as many digests, one behind the other. Throw
// UsageError before the first block is accessed: ids out of range or duplicate, another number of
// keys.
void seal_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                 std::span<const std::uint8_t> keys);
void verify_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                   std::span<const std::uint8_t> keys, StoreResult* results);

}  // namespace aiokv
