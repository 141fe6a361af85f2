// Stores of whole cache lines that bypass the caches: no line of the target is read first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace aiokv {

constexpr std::size_t kLineBytes = 64;

inline bool is_line_aligned(const void* address) {
    return reinterpret_cast<std::uintptr_t>(address) % kLineBytes == 0;
}

#if defined(__SSE2__)

inline constexpr bool kHasStreamingStores = true;

// Requires an aligned `to`. Call streaming_fence() before another thread is told of the bytes.
inline void stream_line(char* to, const char* from) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

// Accepts any address, even an invalid one. With the non-temporal hint, copies were 1.7 times
// slower on a Xeon of 2023 (bench/peer_layouts.py).
inline void prefetch_line(const char* from) {
    _mm_prefetch(from, _MM_HINT_T0);
}

#else

inline constexpr bool kHasStreamingStores = false;

inline void stream_line(char* to, const char* from) {
    std::memcpy(to, from, kLineBytes);
}

inline void prefetch_line(const char* /*from*/) {}

#endif

// memcpy whose stores bypass the caches when `streaming`; needs a streaming_fence() before the
// bytes are announced to another thread.
void copy_bytes(void* to, const void* from, std::size_t bytes, bool streaming);
void streaming_fence();

}  // namespace aiokv
