#include "aiokv/trailer.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "aiokv/cache_lines.hpp"
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

// Returns true if a trailer is that of a key and of a payload with this checksum.
bool is_trailer(const Trailer& found, const Digest& key, std::size_t payload_bytes,
                Checksum checksum) {
    const Trailer expected{.payload_bytes = payload_bytes, .key = key};
    checksum.add({reinterpret_cast<const std::uint8_t*>(&expected), kHeaderBytes});
    return std::memcmp(&found, &expected, kHeaderBytes) == 0 && checksum.value() == found.checksum;
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

bool copy_object(std::span<const std::uint8_t> from, std::span<std::uint8_t> to,
                 const Digest& key) {
    const std::size_t payload_bytes = from.size() - kTrailerBytes;
    Trailer found;
    std::memcpy(&found, &from[payload_bytes], sizeof found);
    const Trailer expected{.payload_bytes = payload_bytes, .key = key};
    if (std::memcmp(&found, &expected, kHeaderBytes) != 0) return false;
    Checksum checksum;
    checksum.add_and_copy(from.first(payload_bytes), to.data());
    std::memcpy(&to[payload_bytes], &found, sizeof found);
    return is_trailer(found, key, payload_bytes, checksum);
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

void copy_objects(const ObjectBlocks& from, std::span<const std::int32_t> from_ids,
                  const ObjectBlocks& to, std::span<const std::int32_t> to_ids,
                  std::span<const std::uint8_t> keys, StoreResult* results) {
    check_batch(from, from_ids, keys);
    check_batch(to, to_ids, keys);
    if (from.payload_bytes != to.payload_bytes) {
        throw UsageError("payload_bytes is " + std::to_string(from.payload_bytes) +
                         " for the blocks to copy, and " + std::to_string(to.payload_bytes) +
                         " for the copies");
    }
    for (std::size_t i = 0; i < from_ids.size(); ++i) {
        const bool copied =
            copy_object(from.object(from_ids[i]), to.object(to_ids[i]), key_at(keys, i));
        results[i] = copied ? StoreResult::kDone : StoreResult::kWrong;
    }
    streaming_fence();
}

ObjectWriter::ObjectWriter(const ObjectBlocks& blocks, std::span<const std::int32_t> ids,
                           std::span<const std::uint8_t> keys)
    : blocks_(blocks),
      ids_(ids.begin(), ids.end()),
      keys_(keys.begin(), keys.end()),
      results_(ids.size(), StoreResult::kWrong) {
    check_batch(blocks, ids, keys);
}

void ObjectWriter::write(std::span<const std::uint8_t> piece) {
    while (!piece.empty() && index_ < ids_.size()) {
        const auto object = blocks_.object(ids_[index_]);
        const auto payload = object.first(blocks_.payload_bytes);
        const std::size_t count = written_ < payload.size() ? write_payload(payload, piece)
                                                            : write_trailer(object, piece);
        piece = piece.subspan(count);
    }
    streaming_fence();
}

std::size_t ObjectWriter::write_payload(std::span<std::uint8_t> payload,
                                        std::span<const std::uint8_t> piece) {
    std::size_t count = std::min(piece.size(), payload.size() - written_);
    const std::size_t before = written_ % Checksum::kChunkBytes;  // bytes of this chunk
    if (before == 0 && count >= Checksum::kChunkBytes) {
        count -= count % Checksum::kChunkBytes;
        checksum_.add_and_copy(piece.first(count), &payload[written_]);
    } else {
        count = std::min(count, Checksum::kChunkBytes - before);
        std::memcpy(&payload[written_], piece.data(), count);
        if (before + count == Checksum::kChunkBytes || written_ + count == payload.size()) {
            checksum_.add(payload.subspan(written_ - before, before + count));
        }
    }
    written_ += count;
    return count;
}

std::size_t ObjectWriter::write_trailer(std::span<std::uint8_t> object,
                                        std::span<const std::uint8_t> piece) {
    const std::size_t count = std::min(piece.size(), object.size() - written_);
    std::memcpy(&object[written_], piece.data(), count);
    written_ += count;
    if (written_ == object.size()) {
        Trailer found;
        std::memcpy(&found, &object[blocks_.payload_bytes], sizeof found);
        if (is_trailer(found, key_at(keys_, index_), blocks_.payload_bytes, checksum_)) {
            results_[index_] = StoreResult::kDone;
        }
        ++index_;
        written_ = 0;
        checksum_ = {};
    }
    return count;
}

}  // namespace aiokv
