#include "aiokv/checksum.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "aiokv/cache_lines.hpp"
#include "aiokv/mersenne.hpp"
#include "aiokv/sha256.hpp"

namespace aiokv {
namespace {

using mersenne::multiplied;
using mersenne::reduced;
using mersenne::U128;

constexpr std::size_t kPrefetchBytes = 2048;
constexpr std::string_view kConstantsTag{"aiokv checksum 1\0", 17};

std::uint64_t load(const std::uint8_t* bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

U128 product(const std::uint8_t* pair, const std::uint64_t* keys) {
    return U128{load(pair) + keys[0]} * (load(pair + 8) + keys[1]);
}

// Copies bytes that others may write meanwhile. The compiler must read `to` afterwards, and not the
// source again.
void copy_once(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
    asm volatile("" : : "r"(to) : "memory");
}

enum class Copies { kNone, kCached, kStreamed };

// Uses two sums, so that an addition need not wait for the one before it. Prefetches, because the
// processor looks less far ahead in memory than this loop needs; a prefetch behind the end of the
// input has no effect. Copies line by line, so that the processor multiplies while it waits for the
// memory.
template <Copies kCopies>
U128 nh_of_chunk(const std::uint8_t* bytes, const std::uint64_t* keys, std::uint8_t* to = nullptr) {
    constexpr std::size_t kAhead = kCopies == Copies::kNone ? kPrefetchBytes : 2 * kPrefetchBytes;
    U128 even = 0, odd = 0;
    for (std::size_t i = 0; i < Checksum::kChunkBytes; i += kLineBytes) {
        __builtin_prefetch(bytes + i + kAhead);
        const std::uint8_t* line = bytes + i;
        if constexpr (kCopies == Copies::kCached) {
            copy_once(to + i, line, kLineBytes);
            line = to + i;
        }
        alignas(kLineBytes) std::uint8_t copy[kLineBytes];
        if constexpr (kCopies == Copies::kStreamed) {
            copy_once(copy, line, kLineBytes);
            line = copy;
            stream_line(reinterpret_cast<char*>(to + i), reinterpret_cast<const char*>(copy));
        }
        for (std::size_t j = 0; j < kLineBytes; j += 32) {
            even += product(line + j, keys + (i + j) / 8);
            odd += product(line + j + 16, keys + (i + j) / 8 + 2);
        }
    }
    return even + odd;
}

U128 nh_of_tail(std::span<const std::uint8_t> bytes, const std::uint64_t* keys) {
    U128 sum = 0;
    std::size_t i = 0;
    for (; i + 16 <= bytes.size(); i += 16) sum += product(bytes.data() + i, keys + i / 8);
    if (i < bytes.size()) {
        std::array<std::uint8_t, 16> last{};
        std::ranges::copy(bytes.subspan(i), last.begin());
        sum += product(last.data(), keys + i / 8);
    }
    return sum;
}

}  // namespace

const ChecksumConstants& checksum_constants() {
    static const ChecksumConstants computed = [] {
        constexpr std::size_t kDigests = Checksum::kChunkBytes / 32 + 1;
        std::array<std::uint8_t, kDigests * 32> bytes;
        for (std::uint32_t i = 0; i < kDigests; ++i) {
            Sha256 hash;
            hash.add({reinterpret_cast<const std::uint8_t*>(kConstantsTag.data()),
                      kConstantsTag.size()});
            hash.add({reinterpret_cast<const std::uint8_t*>(&i), sizeof i});
            std::ranges::copy(hash.finish(), bytes.begin() + 32 * i);
        }
        ChecksumConstants made;
        std::memcpy(made.words.data(), bytes.data(), sizeof made.words);
        std::memcpy(&made.factor, bytes.data() + sizeof made.words, sizeof made.factor);
        made.factor &= mersenne::kPrime;
        return made;
    }();
    return computed;
}

void Checksum::add(std::span<const std::uint8_t> bytes) {
    const ChecksumConstants& k = checksum_constants();
    for (; bytes.size() >= kChunkBytes; bytes = bytes.subspan(kChunkBytes)) {
        add_chunk(nh_of_chunk<Copies::kNone>(bytes.data(), k.words.data()));
    }
    if (!bytes.empty()) add_chunk(nh_of_tail(bytes, k.words.data()));
}

void Checksum::add_and_copy(std::span<const std::uint8_t> bytes, std::uint8_t* to) {
    const ChecksumConstants& k = checksum_constants();
    const bool streams = kHasStreamingStores && is_line_aligned(to);
    const auto nh = streams ? nh_of_chunk<Copies::kStreamed> : nh_of_chunk<Copies::kCached>;
    for (; bytes.size() >= kChunkBytes; bytes = bytes.subspan(kChunkBytes), to += kChunkBytes) {
        add_chunk(nh(bytes.data(), k.words.data(), to));
    }
    copy_once(to, bytes.data(), bytes.size());
    add({to, bytes.size()});
}

void Checksum::add_chunk(unsigned __int128 nh) {
    sum_ = reduced(multiplied(sum_, checksum_constants().factor) + reduced(nh));
}

std::array<std::uint8_t, Checksum::kBytes> Checksum::value() const {
    std::array<std::uint8_t, kBytes> bytes;
    std::memcpy(bytes.data(), &sum_, sizeof sum_);
    return bytes;
}

}  // namespace aiokv
