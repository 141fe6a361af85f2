#include "aiokv/digest.hpp"

#include <algorithm>
#include <bit>

namespace aiokv {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they are in memory; the digest defines them as little-endian");

constexpr std::string_view kRootTag{"aiokv root 2\0", 13};
constexpr std::string_view kSaltTag{"aiokv salt 1\0", 13};
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

std::span<std::uint8_t, kSaltLabelBytes> label_of(Digest& digest) {
    return std::span(digest).subspan<kSaltLabelAt, kSaltLabelBytes>();
}

std::span<const std::uint8_t, kSaltLabelBytes> label_of(const Digest& digest) {
    return std::span(digest).subspan<kSaltLabelAt, kSaltLabelBytes>();
}

Digest with_label(Digest digest, const Digest& source) {
    std::ranges::copy(label_of(source), label_of(digest).begin());
    return digest;
}

// Writes the labels behind the hash of a key.
void add_labels(Digest& key, const Digest& fingerprint, const Digest& digest) {
    std::copy(fingerprint.end() - kSourceLabelBytes, fingerprint.end(),
              key.end() - kSourceLabelBytes - kSaltLabelBytes);
    std::ranges::copy(label_of(digest), key.end() - kSaltLabelBytes);
}

}  // namespace

std::string_view salt_of(std::string_view context) {
    std::size_t characters = 0;
    std::size_t at = 0;
    for (; at < context.size() && context[at] >= '0' && context[at] <= '9'; ++at) {
        characters = characters * 10 + static_cast<std::size_t>(context[at] - '0');
    }
    if (at == 0 || at == context.size() || context[at] != ':') return {};
    const std::size_t begin = ++at;
    const auto continues = [&] { return (static_cast<unsigned char>(context[at]) & 0xc0) == 0x80; };
    for (; at < context.size() && (characters > 0 || continues()); ++at) {
        if (!continues()) --characters;
    }
    return context.substr(begin, at - begin);
}

SaltLabel salt_label(std::string_view salt) {
    Sha256 hash;
    hash.add(bytes_of(kSaltTag));
    hash.add(bytes_of(salt));
    const Digest digest = hash.finish();
    SaltLabel label;
    std::copy_n(digest.begin(), label.size(), label.begin());
    return label;
}

Digest root_digest(std::uint32_t block_tokens, std::string_view context, Sha256Blocks add_blocks) {
    Sha256 hash(add_blocks);
    hash.add(bytes_of(kRootTag));
    hash.add(bytes_of(block_tokens));
    add_with_length(hash, context);
    Digest digest = hash.finish();
    std::ranges::copy(salt_label(salt_of(context)), label_of(digest).begin());
    return digest;
}

Digest block_digest(const Digest& parent, std::span<const std::int32_t> tokens,
                    std::string_view items, Sha256Blocks add_blocks) {
    Sha256 hash(add_blocks);
    hash.add(parent);
    hash.add(bytes_of(tokens));
    if (!items.empty()) add_with_length(hash, items);
    return with_label(hash.finish(), parent);
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
            for (const std::size_t made : {i, i + 1}) {
                add_labels(keys[made], fingerprint, digests[made]);
            }
        }
    }
    for (; i < digests.size(); ++i) {
        Sha256 hash(add_blocks);
        hash.add(fingerprint);
        hash.add(digests[i]);
        keys[i] = hash.finish();
        add_labels(keys[i], fingerprint, digests[i]);
    }
}

}  // namespace aiokv
