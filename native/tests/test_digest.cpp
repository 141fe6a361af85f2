// SHA-256 in both implementations, digests, the checksum, and trailers.
#include "aiokv/digest.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "aiokv/checksum.hpp"
#include "aiokv/error.hpp"
#include "aiokv/trailer.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

std::vector<Sha256Blocks> implementations() {
    std::vector<Sha256Blocks> all{sha256_blocks_portable};
    if (sha256_blocks_native() != nullptr) all.push_back(sha256_blocks_native());
    return all;
}

template <typename Bytes>
std::string hex(const Bytes& bytes) {
    std::string text;
    for (const std::uint8_t byte : bytes) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

std::vector<std::uint8_t> numbered(std::size_t size) {
    std::vector<std::uint8_t> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
    return bytes;
}

std::string sha256(Sha256Blocks add_blocks, std::span<const std::uint8_t> bytes) {
    Sha256 hash(add_blocks);
    hash.add(bytes);
    return hex(hash.finish());
}

std::span<const std::uint8_t> bytes_of(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::string checksum(std::span<const std::uint8_t> bytes) {
    Checksum sum;
    sum.add(bytes);
    return hex(sum.value());
}

const Digest kKey = root_digest(16, "key");

// Objects of `payload_bytes` in blocks of a larger pitch, with the keys of their numbers.
struct Arena {
    explicit Arena(std::uint64_t payload_bytes, std::uint64_t num_blocks)
        : memory(numbered(num_blocks * (payload_bytes + 100))),
          blocks{memory.data(), num_blocks, payload_bytes + 100, payload_bytes} {
        for (std::uint32_t i = 0; i < num_blocks; ++i) {
            const Digest key = root_digest(i + 1, "");
            keys.insert(keys.end(), key.begin(), key.end());
            ids.push_back(static_cast<std::int32_t>(num_blocks - 1 - i));
        }
    }

    std::vector<StoreResult> verify() const {
        std::vector<StoreResult> results(ids.size());
        verify_blocks(blocks, ids, keys, results.data());
        return results;
    }

    std::vector<std::uint8_t> memory;
    ObjectBlocks blocks;
    std::vector<std::uint8_t> keys;
    std::vector<std::int32_t> ids;
};

}  // namespace

TEST(sha256_has_the_digests_of_the_standard_in_each_implementation) {
    for (const Sha256Blocks add_blocks : implementations()) {
        CHECK_EQ(sha256(add_blocks, {}),
                 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        CHECK_EQ(sha256(add_blocks, bytes_of("abc")),
                 "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        CHECK_EQ(sha256(add_blocks,
                        bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
                 "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
        CHECK_EQ(sha256(add_blocks, std::vector<std::uint8_t>(1'000'000, 'a')),
                 "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
}

TEST(implementations_of_sha256_agree_on_every_length) {
    const auto bytes = numbered(300);
    for (std::size_t length = 0; length <= bytes.size(); ++length) {
        const auto part = std::span(bytes).first(length);
        for (const Sha256Blocks add_blocks : implementations()) {
            CHECK_EQ(sha256(add_blocks, part), sha256(sha256_blocks_portable, part));
        }
    }
}

TEST(sha256_does_not_depend_on_the_pieces_that_are_added) {
    const auto bytes = numbered(200);
    for (const Sha256Blocks add_blocks : implementations()) {
        for (std::size_t first = 0; first <= 130; ++first) {
            for (const std::size_t second : {0, 1, 63, 64, 65}) {
                Sha256 hash(add_blocks);
                hash.add(std::span(bytes).first(first));
                hash.add(std::span(bytes).subspan(first, second));
                hash.add(std::span(bytes).subspan(first + second));
                CHECK_EQ(hex(hash.finish()), sha256(add_blocks, bytes));
            }
        }
    }
}

TEST(fastest_implementation_uses_the_instructions_of_the_processor) {
    CHECK(sha256_blocks_fastest() ==
          (sha256_blocks_native() != nullptr ? sha256_blocks_native() : sha256_blocks_portable));
}

// Returns the hexadecimal digest with the label of a salt.
std::string labelled(std::string digest, std::string_view salt) {
    const SaltLabel label = salt_label(salt);
    return digest.replace(32, 10, hex(label));
}

TEST(salt_of_a_context_counts_characters) {
    CHECK_EQ(std::string(salt_of("")), "");
    CHECK_EQ(std::string(salt_of("7:tenant1adapter")), "tenant1");
    CHECK_EQ(std::string(salt_of("2:\xc3\xa9\xc3\x9f"
                                 "adapter")),
             "\xc3\xa9\xc3\x9f");
    CHECK_EQ(std::string(salt_of("0:adapter")), "");
    CHECK_EQ(std::string(salt_of("3:a:badapter")), "a:b");
    CHECK_EQ(std::string(salt_of("no number")), "");
}

TEST(digests_are_hashes_of_the_documented_bytes) {
    for (const Sha256Blocks add_blocks : implementations()) {
        const std::string_view root_bytes("aiokv root 2\0\x10\0\0\0\x03\0\0\0abc", 24);
        const Digest root = root_digest(16, "abc", add_blocks);
        CHECK_EQ(hex(root), labelled(sha256(add_blocks, bytes_of(root_bytes)), ""));

        std::string block_bytes(root.begin(), root.end());
        block_bytes += std::string_view("\x01\0\0\0\xff\xff\xff\xff", 8);
        const std::vector<std::int32_t> tokens{1, -1};
        CHECK_EQ(hex(block_digest(root, tokens, "", add_blocks)),
                 labelled(sha256(add_blocks, bytes_of(block_bytes)), ""));
        block_bytes += std::string_view("\x04\0\0\0item", 8);
        CHECK_EQ(hex(block_digest(root, tokens, "item", add_blocks)),
                 labelled(sha256(add_blocks, bytes_of(block_bytes)), ""));
    }
}

TEST(keys_are_hashes_of_fingerprint_and_digest_in_each_implementation) {
    std::vector<Digest> digests;
    std::vector<std::string> expected;
    for (std::uint32_t i = 0; i < 7; ++i) {
        digests.push_back(root_digest(i + 1, ""));
        std::string bytes(kKey.begin(), kKey.end());
        bytes.append(digests[i].begin(), digests[i].end());
        const std::string hashed = sha256(sha256_blocks_portable, bytes_of(bytes));
        expected.push_back(hashed.substr(0, 42) + hex(kKey).substr(52) +
                           hex(digests[i]).substr(32, 10));
    }
    for (const Sha256Blocks add_blocks : implementations()) {
        for (const Sha256TwoMessages two : {Sha256TwoMessages{}, sha256_two_messages_native()}) {
            for (std::size_t count = 0; count <= digests.size(); ++count) {
                std::vector<Digest> keys(count);
                derive_keys(kKey, std::span(digests).first(count), keys, add_blocks, two);
                for (std::size_t i = 0; i < count; ++i) CHECK_EQ(hex(keys[i]), expected[i]);
            }
        }
    }
}

TEST(checksum_depends_on_every_bit_and_on_the_place_of_each_word) {
    for (const std::size_t size : {1, 15, 16, 17, 1023, 1024, 1025, 2064}) {
        auto bytes = numbered(size);
        const std::string right = checksum(bytes);
        for (std::size_t bit = 0; bit < 8 * size; ++bit) {
            bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
            CHECK(checksum(bytes) != right);
            bytes[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        }
        for (std::size_t i = 8; i + 8 <= size; i += 8) {
            std::swap_ranges(&bytes[i - 8], &bytes[i], &bytes[i]);
            CHECK(checksum(bytes) != right);
            std::swap_ranges(&bytes[i - 8], &bytes[i], &bytes[i]);
        }
        CHECK_EQ(checksum(bytes), right);
    }
}

TEST(checksum_of_zeros_depends_on_the_number_of_chunks) {
    const std::vector<std::uint8_t> zeros(4096);
    CHECK(checksum(std::span(zeros).first(1024)) != checksum(std::span(zeros).first(2048)));
    CHECK(checksum(std::span(zeros).first(2048)) != checksum(zeros));
    CHECK(checksum({}) != checksum(zeros));
}

TEST(sealed_object_is_right_with_its_key_only) {
    for (const std::size_t payload : {0, 1, 64, 1000, 1024, 5000}) {
        auto object = numbered(payload + kTrailerBytes);
        CHECK(!verify_object(object, kKey));
        seal_object(object, kKey);
        CHECK(verify_object(object, kKey));
        CHECK(!verify_object(object, root_digest(16, "another key")));
    }
}

TEST(every_changed_bit_and_every_other_length_of_an_object_is_found) {
    auto object = numbered(1100 + kTrailerBytes);
    seal_object(object, kKey);
    for (std::size_t bit = 0; bit < 8 * object.size(); ++bit) {
        object[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        CHECK(!verify_object(object, kKey));
        object[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    }
    for (std::size_t size = 0; size < object.size(); ++size) {
        CHECK(!verify_object(std::span(object).first(size), kKey));
        CHECK(!verify_object(std::span(object).last(size), kKey));
    }
    // The trailer of a shorter object at the end of a longer one.
    object.insert(object.begin(), 0);
    CHECK(!verify_object(object, kKey));
}

TEST(blocks_are_sealed_and_verified_with_the_key_of_their_index) {
    Arena arena(2000, 5);
    CHECK(arena.verify() == std::vector(5, StoreResult::kWrong));
    const auto before = arena.memory;
    seal_blocks(arena.blocks, arena.ids, arena.keys);
    CHECK(arena.verify() == std::vector(5, StoreResult::kDone));
    for (std::size_t i = 0; i < before.size(); ++i) {
        const std::size_t place = i % arena.blocks.pitch_bytes;
        if (place < 2000 || place >= 2000 + kTrailerBytes) CHECK_EQ(arena.memory[i], before[i]);
    }
    arena.memory[3 * arena.blocks.pitch_bytes + 1999] ^= 1;
    auto expected = std::vector(5, StoreResult::kDone);
    expected[1] = StoreResult::kWrong;  // ids[1] is block 3
    CHECK(arena.verify() == expected);
}

TEST(copied_objects_are_verified_with_the_key_of_their_index) {
    for (const std::uint64_t payload_bytes : {1, 1000, 1024, 1025, 5000}) {
        Arena source(payload_bytes, 5);
        Arena target(payload_bytes, 7);
        seal_blocks(source.blocks, source.ids, source.keys);
        source.memory[3 * source.blocks.pitch_bytes + payload_bytes - 1] ^= 1;   // ids[1]
        source.memory[2 * source.blocks.pitch_bytes + payload_bytes + 20] ^= 1;  // key of ids[2]
        const std::vector<std::int32_t> targets{6, 5, 4, 3, 0};
        const auto before = target.memory;
        std::vector<StoreResult> results(5);
        copy_objects(source.blocks, source.ids, target.blocks, targets, source.keys,
                     results.data());
        auto expected = std::vector(5, StoreResult::kDone);
        expected[1] = expected[2] = StoreResult::kWrong;
        CHECK(results == expected);
        for (const std::size_t i : {0, 3, 4}) {
            CHECK(std::ranges::equal(source.blocks.object(source.ids[i]),
                                     target.blocks.object(targets[i])));
        }
        for (std::size_t i = 0; i < before.size(); ++i) {
            const std::size_t block = i / target.blocks.pitch_bytes;
            const bool is_target = block == 0 || block >= 3;
            const bool is_object = i % target.blocks.pitch_bytes < payload_bytes + kTrailerBytes;
            if (!is_target || !is_object) CHECK_EQ(target.memory[i], before[i]);
        }
        Arena other(payload_bytes + 1, 5);
        CHECK_THROWS(UsageError, copy_objects(source.blocks, source.ids, other.blocks, source.ids,
                                              source.keys, results.data()));
    }
}

TEST(objects_in_pieces_are_verified_with_the_key_of_their_index) {
    constexpr std::size_t kPitch = 6144, kBlocks = 7;
    const std::vector<std::int32_t> targets{6, 5, 4, 3, 0};
    for (const std::uint64_t payload_bytes : {1, 1000, 1024, 1025, 5000}) {
        Arena source(payload_bytes, 5);
        seal_blocks(source.blocks, source.ids, source.keys);
        source.memory[3 * source.blocks.pitch_bytes + payload_bytes - 1] ^= 1;   // ids[1]
        source.memory[2 * source.blocks.pitch_bytes + payload_bytes + 20] ^= 1;  // key of ids[2]
        std::vector<std::uint8_t> bytes;
        std::vector<std::uint8_t> expected(kBlocks * kPitch, 0xEE);
        for (std::size_t i = 0; i < targets.size(); ++i) {
            const auto object = source.blocks.object(source.ids[i]);
            bytes.insert(bytes.end(), object.begin(), object.end());
            std::ranges::copy(object, &expected[targets[i] * kPitch]);
        }
        bytes.insert(bytes.end(), 100, 0xDD);  // behind the last object
        for (const std::size_t piece_bytes : {1, 63, 1024, 1500, 4096, 100'000}) {
            for (const std::size_t misalignment : {0, 1}) {  // of the blocks, to cache lines
                std::vector<std::uint8_t> memory(kBlocks * kPitch + 65, 0xEE);
                std::uint8_t* address = memory.data() + misalignment;
                while (reinterpret_cast<std::uintptr_t>(address) % 64 != misalignment) ++address;
                ObjectWriter writer({address, kBlocks, kPitch, payload_bytes}, targets,
                                    source.keys);
                for (std::size_t i = 0; i < bytes.size(); i += piece_bytes) {
                    const auto done = std::ranges::count(writer.results(), StoreResult::kDone);
                    CHECK(done * (payload_bytes + kTrailerBytes) <= i);
                    writer.write(
                        std::span(bytes).subspan(i, std::min(piece_bytes, bytes.size() - i)));
                }
                auto results = std::vector(5, StoreResult::kDone);
                results[1] = results[2] = StoreResult::kWrong;
                CHECK(std::ranges::equal(writer.results(), results));
                CHECK(std::ranges::equal(std::span(address, expected.size()), expected));
            }
        }
    }
}

TEST(copies_of_an_object_that_changes_meanwhile_are_wrong_or_whole) {
    for (const std::size_t misalignment : {0, 1}) {  // of the copies, to cache lines
        Arena source(4096, 1);
        seal_blocks(source.blocks, source.ids, source.keys);
        const auto sealed = source.memory;
        std::vector<std::uint8_t> memory(source.blocks.pitch_bytes + 65);
        std::uint8_t* address = memory.data();
        while (reinterpret_cast<std::uintptr_t>(address) % 64 != misalignment) ++address;
        ObjectBlocks target = source.blocks;
        target.address = address;
        std::jthread writer([&](std::stop_token stop) {  // at most one byte at a time is wrong
            for (std::uint32_t i = 0; !stop.stop_requested(); ++i) {
                std::atomic_ref(source.memory[i * 1051 % 4096]).fetch_xor(1);
                std::atomic_ref(source.memory[i * 1051 % 4096]).fetch_xor(1);
            }
        });
        bool is_whole = true;
        for (int i = 0; i < 50'000; ++i) {
            StoreResult result{};
            copy_objects(source.blocks, source.ids, target, source.ids, source.keys, &result);
            if (result != StoreResult::kDone) continue;
            is_whole =
                is_whole &&
                std::ranges::equal(target.object(0), std::span(sealed).first(4096 + kTrailerBytes));
        }
        CHECK(is_whole);
    }
}

TEST(wrong_batches_are_refused_and_change_nothing) {
    Arena arena(100, 3);
    const auto before = arena.memory;
    const auto refused = [&](const Arena& bad) {
        std::vector<StoreResult> results(bad.ids.size());
        CHECK_THROWS(UsageError, seal_blocks(bad.blocks, bad.ids, bad.keys));
        CHECK_THROWS(UsageError, verify_blocks(bad.blocks, bad.ids, bad.keys, results.data()));
        CHECK_THROWS(UsageError, copy_objects(arena.blocks, arena.ids, bad.blocks, bad.ids,
                                              bad.keys, results.data()));
        CHECK_THROWS(UsageError, ObjectWriter(bad.blocks, bad.ids, bad.keys));
    };
    for (const std::int32_t id : {-1, 3, 1}) {  // ids are 2, 1, 0
        Arena bad = arena;
        bad.blocks.address = arena.memory.data();
        bad.ids[2] = id;
        refused(bad);
    }
    Arena bad = arena;
    bad.keys.pop_back();
    refused(bad);
    for (const ObjectBlocks& blocks :
         {ObjectBlocks{nullptr, 3, 200, 100}, ObjectBlocks{arena.memory.data(), 3, 163, 100},
          ObjectBlocks{arena.memory.data(), 3, 200, ~std::uint64_t{0}},
          ObjectBlocks{arena.memory.data(), 3, ~std::uint64_t{0}, 100},
          ObjectBlocks{arena.memory.data(), ~std::uint64_t{0}, 200, 100}}) {
        Arena other = arena;
        other.blocks = blocks;
        refused(other);
    }
    CHECK(arena.memory == before);
}
