#include <cstring>

#include "aiokv/cache_lines.hpp"

namespace aiokv {

namespace {

// Below this size the unaligned head and tail cost more than streaming stores save.
constexpr std::size_t kMinStreamedBytes = 1024;

void stream_lines(char* to, const char* from, std::size_t lines) {
    for (std::size_t i = 0; i < lines; ++i, to += kLineBytes, from += kLineBytes) {
        prefetch_line(from + 8 * kLineBytes);
        stream_line(to, from);
    }
}

}  // namespace

void copy_bytes(void* to, const void* from, std::size_t bytes, bool streaming) {
    if (!kHasStreamingStores || !streaming || bytes < kMinStreamedBytes) {
        std::memcpy(to, from, bytes);
        return;
    }
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    const std::size_t head =
        (kLineBytes - reinterpret_cast<std::uintptr_t>(target) % kLineBytes) % kLineBytes;
    std::memcpy(target, source, head);
    const std::size_t lines = (bytes - head) / kLineBytes;
    stream_lines(target + head, source + head, lines);
    const std::size_t copied = head + lines * kLineBytes;
    std::memcpy(target + copied, source + copied, bytes - copied);
}

void streaming_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace aiokv
