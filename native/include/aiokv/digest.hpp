// Digests of blocks, and their keys in the stores. Equal in every process and on every machine.
//
//   root digest  = SHA-256("aiokv root 1\0" | u32 block_tokens | u32 context bytes | context)
//   block digest = SHA-256(parent digest | int32 tokens of the block)
//                  SHA-256(parent digest | int32 tokens of the block
//                          | u32 bytes of the item key | item key)    if an item touches it
//   key          = SHA-256(fingerprint | block digest)
//   prompt digest = SHA-256("aiokv prompt 1\0" | u32 context bytes | context | u64 tokens
//                           | int32 tokens)
//                   SHA-256(... | u32 bytes of the item key | item key)    if there are items
//
// An item key has, for each item that touches the block, in order: i64 bytes of its content hash |
// content hash | i64 offset of the item from the first position of the block | i64 positions of the
// item. That of a prompt is the item key of a block that has all its positions. Numbers are
// little-endian. The parent digest chains all earlier tokens, the context (salt and adapter) and
// block_tokens; a prompt digest is the same for any block_tokens. The fingerprint tells the model,
// its weights, and the layout of the bytes (aiokv/stores/identity.py).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "aiokv/sha256.hpp"

namespace aiokv {

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
