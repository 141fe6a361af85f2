// SHA-256 with the SHA instructions of x86-64.
#include "aiokv/sha256.hpp"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "sha256_constants.hpp"

namespace aiokv {
namespace {

constexpr unsigned kLeaf1EcxSsse3 = 1u << 9, kLeaf1EcxSse41 = 1u << 19, kLeaf7EbxSha = 1u << 29;

bool has_sha_instructions() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    if (!(ecx & kLeaf1EcxSsse3) || !(ecx & kLeaf1EcxSse41)) return false;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & kLeaf7EbxSha);
}

// The instructions keep the state in two registers, (a, b, e, f) and (c, d, g, h), with a and c in
// the highest lanes. Four rounds take four words of the message schedule; `w` has the last sixteen.
// Each round waits for the one before it, so a second message costs little more time.
template <int kMessages>
__attribute__((target("sha,sse4.1,ssse3"))) void add_blocks(std::uint32_t* const* states,
                                                            const std::uint8_t* const* bytes,
                                                            std::size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[kMessages], cdgh[kMessages];
    for (int m = 0; m < kMessages; ++m) {
        const auto* words = reinterpret_cast<const __m128i*>(states[m]);
        const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
        const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
        abef[m] = _mm_alignr_epi8(cdab, efgh, 8);
        cdgh[m] = _mm_blend_epi16(efgh, cdab, 0xf0);
    }
    for (std::size_t offset = 0; offset < 64 * blocks; offset += 64) {
        __m128i abef_before[kMessages], cdgh_before[kMessages], w[kMessages][4];
        for (int m = 0; m < kMessages; ++m) abef_before[m] = abef[m], cdgh_before[m] = cdgh[m];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            const auto* constants =
                reinterpret_cast<const __m128i*>(kSha256RoundConstants.data()) + i;
#pragma GCC unroll 2
            for (int m = 0; m < kMessages; ++m) {
                __m128i& now = w[m][i & 3];
                if (i < 4) {
                    const auto* source = reinterpret_cast<const __m128i*>(bytes[m] + offset) + i;
                    now = _mm_shuffle_epi8(_mm_loadu_si128(source), big_endian);
                } else {
                    const __m128i minus15 = _mm_sha256msg1_epu32(now, w[m][(i + 1) & 3]);
                    const __m128i minus7 = _mm_alignr_epi8(w[m][(i + 3) & 3], w[m][(i + 2) & 3], 4);
                    now = _mm_sha256msg2_epu32(_mm_add_epi32(minus15, minus7), w[m][(i + 3) & 3]);
                }
                const __m128i sum = _mm_add_epi32(now, _mm_load_si128(constants));
                cdgh[m] = _mm_sha256rnds2_epu32(cdgh[m], abef[m], sum);
                abef[m] = _mm_sha256rnds2_epu32(abef[m], cdgh[m], _mm_shuffle_epi32(sum, 0x0e));
            }
        }
        for (int m = 0; m < kMessages; ++m) {
            abef[m] = _mm_add_epi32(abef[m], abef_before[m]);
            cdgh[m] = _mm_add_epi32(cdgh[m], cdgh_before[m]);
        }
    }
    for (int m = 0; m < kMessages; ++m) {
        auto* words = reinterpret_cast<__m128i*>(states[m]);
        const __m128i feba = _mm_shuffle_epi32(abef[m], 0x1b);
        const __m128i dchg = _mm_shuffle_epi32(cdgh[m], 0xb1);
        _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
    }
}

void add_blocks_of_one(std::uint32_t* state, const std::uint8_t* bytes, std::size_t blocks) {
    add_blocks<1>(&state, &bytes, blocks);
}

bool available() {
    static const bool found = has_sha_instructions();
    return found;
}

}  // namespace

Sha256Blocks sha256_blocks_native() {
    return available() ? add_blocks_of_one : nullptr;
}

Sha256TwoMessages sha256_two_messages_native() {
    return available() ? add_blocks<2> : nullptr;
}

}  // namespace aiokv

#else

namespace aiokv {

Sha256Blocks sha256_blocks_native() {
    return nullptr;
}

Sha256TwoMessages sha256_two_messages_native() {
    return nullptr;
}

}  // namespace aiokv

#endif
