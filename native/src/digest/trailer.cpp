#include "aiokv/trailer.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "aiokv/checksum.hpp"
#include "aiokv/error.hpp"

namespace aiokv {
namespace {

struct Trailer {
    std::uint32_t magic = kTrailerMagic;
    std::uint32_t version = kTrailerVersion;
    std::uint64_t payload_bytes;
    Digest key;
    std::array<std::uint8_t, Checksum::kBytes> checksum{};
};
static_assert(sizeof(Trailer) == kTrailerBytes);

constexpr std::size_t kHeaderBytes = offsetof(Trailer, checksum);

// Returns the correct trailer of a payload, including its checksum.
Trailer trailer_of(std::span<const std::uint8_t> payload, const Digest& key) {
    Trailer trailer{.payload_bytes = payload.size(), .key = key};
    Checksum checksum;
    checksum.add(payload);
    checksum.add({reinterpret_cast<const std::uint8_t*>(&trailer), kHeaderBytes});
    trailer.checksum = checksum.value();
    return trailer;
}

Digest key_at(std::span<const std::uint8_t> keys, std::size_t index) {
    Digest key;
    std::memcpy(key.data(), &keys[index * key.size()], key.size());
    return key;
}

void check_batch(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                 std::span<const std::uint8_t> keys) {
    blocks.check();
    if (keys.size() != ids.size() * sizeof(Digest)) {
        throw UsageError("keys has " + std::to_string(keys.size()) + " bytes; " +
                         std::to_string(ids.size()) + " blocks have " +
                         std::to_string(ids.size() * sizeof(Digest)) + " bytes of keys");
    }
    const auto limit = static_cast<std::int64_t>(blocks.num_blocks);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || ids[i] >= limit) {
            throw UsageError("host block " + std::to_string(ids[i]) + " at index " +
                             std::to_string(i) + " is not in [0, " + std::to_string(limit) + ")");
        }
    }
    std::vector<std::int32_t> sorted(ids.begin(), ids.end());
    std::ranges::sort(sorted);
    const auto twice = std::ranges::adjacent_find(sorted);
    if (twice != sorted.end()) {
        throw UsageError("host block " + std::to_string(*twice) + " is listed more than once");
    }
}

}  // namespace

void ObjectBlocks::check() const {
    constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 62;
    if (payload_bytes > kMaxBytes || pitch_bytes > kMaxBytes ||
        payload_bytes + kTrailerBytes > pitch_bytes) {
        throw UsageError("pitch_bytes is " + std::to_string(pitch_bytes) +
                         "; it must be at least " + std::to_string(kTrailerBytes) +
                         " more than payload_bytes (" + std::to_string(payload_bytes) +
                         ") and at most 2^62");
    }
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    if (num_blocks > 0 && (begin == 0 || num_blocks > (kMaxBytes - 1) / pitch_bytes ||
                           begin > kMaxBytes - num_blocks * pitch_bytes)) {
        throw UsageError("address is " + std::to_string(begin) + " for " +
                         std::to_string(num_blocks) + " blocks of " + std::to_string(pitch_bytes) +
                         " bytes; it must be that of memory of this process");
    }
}

void seal_object(std::span<std::uint8_t> object, const Digest& key) {
    const auto payload = object.first(object.size() - kTrailerBytes);
    const Trailer trailer = trailer_of(payload, key);
    std::memcpy(object.data() + payload.size(), &trailer, sizeof trailer);
}

bool verify_object(std::span<const std::uint8_t> object, const Digest& key) {
    if (object.size() < kTrailerBytes) return false;
    const auto payload = object.first(object.size() - kTrailerBytes);
    const std::uint8_t* found = object.data() + payload.size();
    // Compare the header first, which is cheap: the payload of another block need not be read.
    Trailer expected{.payload_bytes = payload.size(), .key = key};
    if (std::memcmp(found, &expected, kHeaderBytes) != 0) return false;
    expected = trailer_of(payload, key);
    return std::memcmp(found, &expected, sizeof expected) == 0;
}

void seal_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                 std::span<const std::uint8_t> keys) {
    check_batch(blocks, ids, keys);
    for (std::size_t i = 0; i < ids.size(); ++i)
        seal_object(blocks.object(ids[i]), key_at(keys, i));
}

void verify_blocks(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                   std::span<const std::uint8_t> keys, StoreResult* results) {
    check_batch(blocks, ids, keys);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        results[i] = verify_object(blocks.object(ids[i]), key_at(keys, i)) ? StoreResult::kDone
                                                                           : StoreResult::kWrong;
    }
}

}  // namespace aiokv
