#include "aiokv/digest.hpp"

#include <algorithm>
#include <bit>

namespace aiokv {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they are in memory; the digest defines them as little-endian");

constexpr std::string_view kRootTag{"aiokv root 1\0", 13};
constexpr std::string_view kPromptTag{"aiokv prompt 1\0", 15};

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

// The message fingerprint | digest: one block, and then a block of padding with the length, 512
// bits.
class KeyMessage {
  public:
    static constexpr std::size_t kBlocks = 2;

    explicit KeyMessage(const Digest& fingerprint) {
        std::ranges::copy(fingerprint, bytes_.begin());
        bytes_[64] = 0x80;
        bytes_[126] = 2;
    }
    const std::uint8_t* with(const Digest& digest) {
        std::ranges::copy(digest, bytes_.begin() + 32);
        return bytes_.data();
    }

  private:
    std::array<std::uint8_t, 64 * kBlocks> bytes_{};
};

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

Digest prompt_digest(std::string_view context, std::span<const std::int32_t> tokens,
                     std::string_view items, Sha256Blocks add_blocks) {
    const std::uint64_t num_tokens = tokens.size();
    Sha256 hash(add_blocks);
    hash.add(bytes_of(kPromptTag));
    add_with_length(hash, context);
    hash.add(bytes_of(std::span(&num_tokens, 1)));
    hash.add(bytes_of(tokens));
    if (!items.empty()) add_with_length(hash, items);
    return hash.finish();
}

void derive_keys(const Digest& fingerprint, std::span<const Digest> digests, std::span<Digest> keys,
                 Sha256Blocks add_blocks, Sha256TwoMessages two_messages) {
    std::size_t i = 0;
    if (two_messages != nullptr && digests.size() > 1) {
        KeyMessage first(fingerprint), second(fingerprint);
        for (; i + 2 <= digests.size(); i += 2) {
            std::array<std::uint32_t, 8> states[2] = {kSha256InitialState, kSha256InitialState};
            std::uint32_t* const states_of[] = {states[0].data(), states[1].data()};
            const std::uint8_t* const bytes[] = {first.with(digests[i]),
                                                 second.with(digests[i + 1])};
            two_messages(states_of, bytes, KeyMessage::kBlocks);
            keys[i] = sha256_digest(states[0]);
            keys[i + 1] = sha256_digest(states[1]);
        }
    }
    for (; i < digests.size(); ++i) {
        Sha256 hash(add_blocks);
        hash.add(fingerprint);
        hash.add(digests[i]);
        keys[i] = hash.finish();
    }
}

}  // namespace aiokv
