#include <cstring>

#include "aiokv/copy.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace aiokv {

#if defined(__SSE2__)

namespace {

constexpr std::size_t kLine = 64;
// Below this size the unaligned head and tail cost more than streaming stores save.
constexpr std::size_t kMinStreamedBytes = 1024;

void stream_lines(char* to, const char* from, std::size_t lines) {
    for (std::size_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
        _mm_prefetch(from + 8 * kLine, _MM_HINT_NTA);
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
}

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes, bool streaming) {
    if (!streaming || bytes < kMinStreamedBytes) {
        std::memcpy(to, from, bytes);
        return;
    }
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine;
    std::memcpy(target, source, head);
    const std::size_t lines = (bytes - head) / kLine;
    stream_lines(target + head, source + head, lines);
    const std::size_t copied = head + lines * kLine;
    std::memcpy(target + copied, source + copied, bytes - copied);
}

void streaming_fence() {
    _mm_sfence();
}

#else

void copy_bytes(void* to, const void* from, std::size_t bytes, bool /*streaming*/) {
    std::memcpy(to, from, bytes);
}

void streaming_fence() {}

#endif

}  // namespace aiokv
