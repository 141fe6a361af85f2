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

// Returns the key of a block of a prompt. `keys`: keys of its blocks up to the last one with items.
inline ItemKey key_of(std::span<const ItemKey> keys, std::size_t block) {
    return block < keys.size() ? keys[block] : kNoItems;
}

// Returns the keys of the blocks from `block` on.
inline std::span<const ItemKey> keys_from(std::span<const ItemKey> keys, std::size_t block) {
    return keys.subspan(std::min(block, keys.size()));
}

class ItemKeys {
  public:
    // Returns the id of these bytes, with one ref for the caller.
    ItemKey intern(std::string bytes);
    // Returns the id of these bytes, or kUnknownItems.
    ItemKey find(const std::string& bytes) const;
    void ref(ItemKey key) { ++entries_[key - 1].refs; }
    void unref(ItemKey key);
    const std::string& bytes(ItemKey key) const { return *entries_[key - 1].bytes; }

    ItemKey of(NodeId node) const { return of_node_.at(node); }
    void attach(NodeId node, ItemKey key);  // takes a ref of its own
    void detach(NodeId node);
    void detach_all();

    std::size_t size() const { return ids_.size(); }
    std::uint64_t total_refs() const;
    std::size_t nodes() const { return of_node_.size(); }

  private:
    struct Entry {
        const std::string* bytes = nullptr;  // points into ids_, whose keys do not move
        std::uint64_t refs = 0;
    };

    std::unordered_map<std::string, ItemKey> ids_;
    std::vector<Entry> entries_;
    std::vector<ItemKey> free_;
    std::unordered_map<NodeId, ItemKey> of_node_;
};

// Throws UsageError if items are out of order, overlapping, empty, or outside the positions from
// `first` to `end` of a prompt. `first` is above 0 when the items are those of appended tokens.
void check_items(std::span<const Item> items, std::size_t first, std::size_t end);

// Returns the key bytes per block, up to the last block that an item touches; empty for blocks
// without items.
std::vector<std::string> item_key_bytes(std::span<const Item> items, std::uint32_t block_tokens);

// Reads the items from the key bytes of a block, and appends those that begin in the block before
// its position `end` to `prompt`, in the form of an item key. The block begins `first` positions
// behind the start of the prompt.
void add_beginning_items(std::string_view bytes, std::uint64_t first, std::uint64_t end,
                         std::string& prompt);

// Returns the key bytes of the same block without the items that begin at its position `end` or
// later.
std::string item_key_before(std::string_view bytes, std::uint32_t end);

}  // namespace aiokv
