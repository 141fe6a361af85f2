#include "aiokv/digest.hpp"

#include <bit>

namespace aiokv {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they are in memory; the digest defines them as little-endian");

constexpr std::string_view kRootTag{"aiokv root 1\0", 13};

template <typename T>
std::span<const std::uint8_t> bytes_of(std::span<const T> values) {
    return {reinterpret_cast<const std::uint8_t*>(values.data()), values.size_bytes()};
}

std::span<const std::uint8_t> bytes_of(std::string_view text) {
    return bytes_of(std::span(text));
}

std::span<const std::uint8_t> bytes_of(const std::uint32_t& number) {
    return bytes_of(std::span(&number, 1));
}

void add_with_length(Sha256& hash, std::string_view text) {
    hash.add(bytes_of(static_cast<std::uint32_t>(text.size())));
    hash.add(bytes_of(text));
}

}  // namespace

Digest root_digest(std::uint32_t block_tokens, std::string_view context, Sha256Blocks add_blocks) {
    Sha256 hash(add_blocks);
    hash.add(bytes_of(kRootTag));
    hash.add(bytes_of(block_tokens));
    add_with_length(hash, context);
    return hash.finish();
}

Digest block_digest(const Digest& parent, std::span<const std::int32_t> tokens,
                    std::string_view items, Sha256Blocks add_blocks) {
    Sha256 hash(add_blocks);
    hash.add(parent);
    hash.add(bytes_of(tokens));
    if (!items.empty()) add_with_length(hash, items);
    return hash.finish();
}

Digest derive_key(const Digest& fingerprint, const Digest& digest, Sha256Blocks add_blocks) {
    Sha256 hash(add_blocks);
    hash.add(fingerprint);
    hash.add(digest);
    return hash.finish();
}

}  // namespace aiokv
