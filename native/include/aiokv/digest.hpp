// Digests of blocks, and their keys in the stores. Equal in every process and on every machine.
//
//   root digest  = SHA-256("aiokv root 2\0" | u32 block_tokens | u32 context bytes | context)
//   block digest = SHA-256(parent digest | int32 tokens of the block)
//                  SHA-256(parent digest | int32 tokens of the block
//                          | u32 bytes of the item key | item key)    if an item touches it
//   salt label   = the first 5 bytes of SHA-256("aiokv salt 1\0" | salt); it replaces the bytes 16
//                  to 20 of a root digest and of a block digest
//   key          = the first 21 bytes of SHA-256(fingerprint | block digest)
//                  | the last 6 bytes of the fingerprint: labels of the model and of its weights
//                  | salt label
//   prompt digest = SHA-256("aiokv prompt 1\0" | u32 context bytes | context | u64 tokens
//                           | int32 tokens)
//                   SHA-256(... | u32 bytes of the item key | item key)    if there are items
//
// An item key has, for each item that touches the block, in order: i64 bytes of its content hash |
// content hash | i64 offset of the item from the first position of the block | i64 positions of the
// item. That of a prompt is the item key of a block that has all its positions. Numbers are
// little-endian. The parent digest chains all earlier tokens, the context (salt and adapter) and
// block_tokens; a prompt digest is the same for any block_tokens. The fingerprint tells the model,
// its weights, and the layout of the bytes (aiokv/stores/identity.py). The labels find all keys of
// a salt, a model or a version; which block a key names depends on its hash alone. The ends of a
// digest, which serve as shorter names of a block, are those of its hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "aiokv/sha256.hpp"

namespace aiokv {

constexpr std::size_t kSaltLabelAt = 16;  // in a digest
constexpr std::size_t kSaltLabelBytes = 5;
constexpr std::size_t kSourceLabelBytes = 6;

using SaltLabel = std::array<std::uint8_t, kSaltLabelBytes>;

// Returns the salt of a context: characters of a salt | ":" | salt | adapter. A context without a
// number has none.
std::string_view salt_of(std::string_view context);
SaltLabel salt_label(std::string_view salt);

Digest root_digest(std::uint32_t block_tokens, std::string_view context,
                   Sha256Blocks add_blocks = sha256_blocks_fastest());

// Returns the digest of a full block behind `parent`. `items`: item key of the block
// (item_key_bytes); empty if no item touches it.
Digest block_digest(const Digest& parent, std::span<const std::int32_t> tokens,
                    std::string_view items, Sha256Blocks add_blocks = sha256_blocks_fastest());

// Computes the keys of digests. `two_messages` is null if the processor has no such implementation.
void derive_keys(const Digest& fingerprint, std::span<const Digest> digests, std::span<Digest> keys,
                 Sha256Blocks add_blocks = sha256_blocks_fastest(),
                 Sha256TwoMessages two_messages = sha256_two_messages_native());

// The digest of a whole prompt.
Digest prompt_digest(std::string_view context, std::span<const std::int32_t> tokens,
                     std::string_view items, Sha256Blocks add_blocks = sha256_blocks_fastest());

}  // namespace aiokv
