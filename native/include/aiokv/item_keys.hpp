// Multimodal items in the index: what sets a block apart beside its token ids.
//
// All placeholder tokens of an image are alike, so the blocks that it touches carry a key made of
// its content hash and of where it lies. Keys are interned, and kept in a side table for the few
// nodes that have one (NodeFlag kHasItems): a cache of text pays nothing for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aiokv/node.hpp"

namespace aiokv {

using ItemKey = std::uint32_t;
constexpr ItemKey kNoItems = 0;
constexpr ItemKey kUnknownItems = ~ItemKey{0};  // no block has this key

struct Item {
    std::string_view hash;
    std::int64_t offset;  // its first position in the prompt
    std::int64_t length;  // in positions
};

// Positions of an item.
struct ItemSpan {
    std::uint64_t start, stop;
};

// The key of a block of a prompt; `keys` are those of its blocks up to the last with items.
inline ItemKey key_of(std::span<const ItemKey> keys, std::size_t block) {
    return block < keys.size() ? keys[block] : kNoItems;
}

// The keys of the blocks from `block` on.
inline std::span<const ItemKey> keys_from(std::span<const ItemKey> keys, std::size_t block) {
    return keys.subspan(std::min(block, keys.size()));
}

class ItemKeys {
  public:
    // The id of these bytes, with a ref for the caller.
    ItemKey intern(std::string bytes);
    // The id of these bytes, or kUnknownItems.
    ItemKey find(const std::string& bytes) const;
    void ref(ItemKey key) { ++entries_[key - 1].refs; }
    void unref(ItemKey key);
    const std::string& bytes(ItemKey key) const { return *entries_[key - 1].bytes; }

    ItemKey of(NodeId node) const { return of_node_.at(node); }
    void attach(NodeId node, ItemKey key);  // takes a ref of its own
    void detach(NodeId node);

    std::size_t size() const { return ids_.size(); }
    std::uint64_t total_refs() const;
    std::size_t nodes() const { return of_node_.size(); }

  private:
    struct Entry {
        const std::string* bytes = nullptr;  // in ids_, whose nodes stay in place
        std::uint64_t refs = 0;
    };

    std::unordered_map<std::string, ItemKey> ids_;
    std::vector<Entry> entries_;
    std::vector<ItemKey> free_;
    std::unordered_map<NodeId, ItemKey> of_node_;
};

// Throws UsageError: not in order, overlapping, empty, or outside the positions from `first` to
// `end` of a prompt. A `first` above 0 is that of appended tokens.
void check_items(std::span<const Item> items, std::size_t first, std::size_t end);

// The key bytes of each block up to the last one that an item touches; empty where none does.
std::vector<std::string> item_key_bytes(std::span<const Item> items, std::uint32_t block_tokens);

// Adds to `prompt` the items that begin in the block of these key bytes, before its position `end`:
// as in the key of a block that begins at the first position of the prompt, `first` positions
// before the block.
void add_beginning_items(std::string_view bytes, std::uint64_t first, std::uint64_t end,
                         std::string& prompt);

// The key bytes of the same block without the items that begin at its position `end` or later.
std::string item_key_before(std::string_view bytes, std::uint32_t end);

}  // namespace aiokv
