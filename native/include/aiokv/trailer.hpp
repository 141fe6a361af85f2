// The trailer of an object in a store. It proves to which block the bytes before it belong.
//
//   offset 0   u32       magic "aikv"
//   offset 4   u32       version, 1
//   offset 8   u64       bytes of the payload
//   offset 16  32 bytes  key of the block
//   offset 48  16 bytes  checksum of the payload, and then of the 48 bytes above
//
// Numbers are little-endian. The trailer directly follows the payload.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/checksum.hpp"
#include "aiokv/digest.hpp"

namespace aiokv {

constexpr std::size_t kTrailerBytes = 64;
constexpr std::uint32_t kTrailerMagic = 0x766b6961;  // "aikv"
constexpr std::uint32_t kTrailerVersion = 1;

// Results per key that these functions return; the values are those of aiokv.stores.Result.
enum class StoreResult : std::uint8_t { kDone = 0, kWrong = 2 };

// Host blocks that hold objects; block i begins at address + i * pitch_bytes.
struct ObjectBlocks {
    std::uint8_t* address;
    std::uint64_t num_blocks;
    std::uint64_t pitch_bytes;
    std::uint64_t payload_bytes;

    // Throws UsageError if a block is larger than the pitch, or if the blocks exceed the address
    // space.
    void check() const;
    std::span<std::uint8_t> object(std::int32_t block) const {
        return {address + static_cast<std::uint64_t>(block) * pitch_bytes,
                payload_bytes + kTrailerBytes};
    }
};

// Writes the trailer at the end of an object whose other bytes are the payload.
void seal_object(std::span<std::uint8_t> object, const Digest& key);

// Returns true if the trailer has this key, the length of the payload and its checksum.
bool verify_object(std::span<const std::uint8_t> object, const Digest& key);

// Seal or verify the objects in the blocks `ids`. `keys`: one digest per block, without gaps. Throw
// UsageError, before the first access, if ids are out of range or duplicate, or if the number of
// keys differs.
void seal_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                 std::span<const std::uint8_t> keys);
void verify_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                   std::span<const std::uint8_t> keys, StoreResult* results);

// Copies the object in block from_ids[i] of `from` to block to_ids[i] of `to`, and verifies the
// copy while it is in the processor's cache. Of a wrong object, a part may have been copied. Other
// processes may write to `from` meanwhile: the bytes of the copy are those that were verified.
// Throws UsageError as verify_blocks does, and if the payloads of the blocks differ in size.
void copy_objects(const ObjectBlocks& from, std::span<const std::int32_t> from_ids,
                  const ObjectBlocks& to, std::span<const std::int32_t> to_ids,
                  std::span<const std::uint8_t> keys, StoreResult* results);

// Writes objects, whose bytes arrive in pieces of any length, to blocks, and verifies each.
class ObjectWriter {
  public:
    // The objects arrive in the order of `ids`. Throws UsageError as verify_blocks does.
    ObjectWriter(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                 std::span<const std::uint8_t> keys);

    // Appends a piece; bytes behind the last object are ignored. Nothing else may write to the
    // blocks meanwhile.
    void write(std::span<const std::uint8_t> piece);

    // kDone for each object that was written as a whole and is right, kWrong for the others.
    std::span<const StoreResult> results() const { return results_; }

  private:
    // Write the next bytes of an object, or a part of them, and return their number.
    std::size_t write_payload(std::span<std::uint8_t> payload, std::span<const std::uint8_t> piece);
    std::size_t write_trailer(std::span<std::uint8_t> object, std::span<const std::uint8_t> piece);

    ObjectBlocks blocks_;
    std::vector<std::int32_t> ids_;
    std::vector<std::uint8_t> keys_;
    std::vector<StoreResult> results_;
    // Of the object that is being written:
    std::size_t index_ = 0;
    std::size_t written_ = 0;
    Checksum checksum_;
};

}  // namespace aiokv
