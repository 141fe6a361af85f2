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

// The instructions keep the state in two registers: (a, b, e, f) and (c, d, g, h), a and c in the
// highest lanes. Four rounds take four words of the message schedule; `w` holds the last sixteen.
__attribute__((target("sha,sse4.1,ssse3"))) void add_blocks(std::uint32_t* state,
                                                            const std::uint8_t* bytes,
                                                            std::size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    auto* words = reinterpret_cast<__m128i*>(state);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; blocks > 0; --blocks, bytes += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            __m128i& now = w[i & 3];
            if (i < 4) {
                const auto* source = reinterpret_cast<const __m128i*>(bytes) + i;
                now = _mm_shuffle_epi8(_mm_loadu_si128(source), big_endian);
            } else {
                const __m128i minus15 = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
                const __m128i minus7 = _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4);
                now = _mm_sha256msg2_epu32(_mm_add_epi32(minus15, minus7), w[(i + 3) & 3]);
            }
            const auto* constants =
                reinterpret_cast<const __m128i*>(kSha256RoundConstants.data()) + i;
            const __m128i sum = _mm_add_epi32(now, _mm_load_si128(constants));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Sha256Blocks sha256_blocks_native() {
    static const bool available = has_sha_instructions();
    return available ? add_blocks : nullptr;
}

}  // namespace aiokv

#else

namespace aiokv {

Sha256Blocks sha256_blocks_native() {
    return nullptr;
}

}  // namespace aiokv

#endif
