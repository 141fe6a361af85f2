// The shape of the prefix index: nodes, their token ids, and how a child is found.
//
// A child is found by its token ids and confirmed by comparing them, so no hash collision can
// return another block. Most nodes have one child, which is compared directly; only the children
// of a fork are hashed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "aiokv/item_keys.hpp"
#include "aiokv/node.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

// The children of one fork: open addressing on a 32-bit tag of their token ids. A large set is
// divided by the highest byte of the tags, so that no insertion moves more than a part of it.
class ChildSet {
  public:
    struct Slot {
        NodeId node = kNone;
        std::uint32_t tag = 0;
    };

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const;

    template <class Equal>
    NodeId find(std::uint32_t tag, Equal equal) const {
        if (parts_) return parts_[tag >> kPartShift].find(tag, equal);
        for (std::size_t i = tag & mask();; i = (i + 1) & mask()) {
            const Slot& slot = slots_[i];
            if (slot.node == kNone) return kNone;
            if (slot.tag == tag && equal(slot.node)) return slot.node;
        }
    }
    // Returns by how many bytes the set has grown.
    std::size_t insert(std::uint32_t tag, NodeId node) { return insert(tag, node, kMaxSlots); }
    void erase(std::uint32_t tag, NodeId node);
    void clear();

    template <class Visit>
    void for_each(Visit visit) const {
        for (std::size_t i = 0; parts_ && i < kParts; ++i) parts_[i].for_each(visit);
        for (const Slot& slot : slots_) {
            if (slot.node != kNone) visit(slot.node);
        }
    }

    // Visits children until `max_slots` slots were looked at. Returns the number of these slots.
    template <class Visit>
    std::size_t for_some(std::size_t max_slots, Visit visit) const {
        std::size_t seen = 0;
        for (std::size_t i = 0; parts_ && i < kParts && seen < max_slots; ++i) {
            seen += parts_[i].for_some(max_slots - seen, visit);
        }
        for (const Slot& slot : slots_) {
            if (seen == max_slots) break;
            ++seen;
            if (slot.node != kNone) visit(slot.node);
        }
        return seen;
    }

    std::uint32_t device_children = 0;

  private:
    static constexpr std::size_t kMaxSlots = 1 << 13;
    static constexpr std::uint32_t kPartShift = 24;
    static constexpr std::size_t kParts = 1 << (32 - kPartShift);

    std::size_t mask() const { return slots_.size() - 1; }
    void place(Slot slot);
    std::size_t insert(std::uint32_t tag, NodeId node, std::size_t max_slots);
    std::size_t grow(std::size_t max_slots);

    std::vector<Slot> slots_ = std::vector<Slot>(4);
    std::unique_ptr<ChildSet[]> parts_;  // once divided; slots_ is empty then
    std::uint32_t size_ = 0;
};

class PrefixTree {
  public:
    static constexpr std::uint32_t kFork = 0x80000000;

    PrefixTree(std::uint32_t block_tokens, std::size_t expected_nodes, std::size_t populated_nodes);

    Node& operator[](NodeId id) { return nodes_[id]; }
    const Node& operator[](NodeId id) const { return nodes_[id]; }
    const std::int32_t* tokens(NodeId id) const { return &tokens_[std::size_t{id} * stride_]; }

    NodeId add_root();
    NodeId find_child(NodeId parent, const std::int32_t* tokens, ItemKey items = kNoItems) const;
    // The child with these tokens and items, made when there is none.
    struct Found {
        NodeId node;
        bool is_new;
    };
    Found find_or_add_child(NodeId parent, const std::int32_t* tokens, ItemKey items = kNoItems);
    ItemKey items(NodeId node) const {
        return nodes_[node].has(kHasItems) ? item_keys_.of(node) : kNoItems;
    }
    ItemKeys& item_keys() { return item_keys_; }
    const ItemKeys& item_keys() const { return item_keys_; }

    // Take the node from its parent. Its own children stay below it.
    void unlink(NodeId node);
    // Forget all children of a node, without visiting them.
    void forget_children(NodeId node);
    void free(NodeId node);

    // Call after a node became device-resident, or is no longer.
    void count_device_child(NodeId node, int change);
    bool has_device_child(NodeId node) const;
    std::uint32_t device_children(NodeId node) const;
    std::uint32_t children(NodeId node) const;
    // kNone where there is none, or several.
    NodeId only_child(NodeId node) const {
        const std::uint32_t child = nodes_[node].child;
        return is_fork(child) ? kNone : child;
    }

    template <class Visit>
    void for_each_child(NodeId node, Visit visit) const {
        const std::uint32_t child = nodes_[node].child;
        if (child == kNone) return;
        if ((child & kFork) == 0) return visit(child);
        forks_[child & ~kFork].for_each(visit);
    }

    // Does the same as for_each_child() for some children: visits at most `max_slots` places of
    // children. Returns the number of visited places.
    template <class Visit>
    std::size_t for_some_children(NodeId node, std::size_t max_slots, Visit visit) const {
        const std::uint32_t child = nodes_[node].child;
        if (child == kNone || max_slots == 0) return 0;
        if ((child & kFork) != 0) return forks_[child & ~kFork].for_some(max_slots, visit);
        visit(child);
        return 1;
    }

    std::uint32_t live_nodes() const { return live_; }
    // Behind the highest id ever used: a scan walks over the ids before it.
    NodeId end_id() const { return static_cast<NodeId>(nodes_.size()); }
    bool is_live(NodeId node) const { return nodes_[node].prev != kFreeNode; }
    std::size_t node_bytes() const { return nodes_.bytes(); }
    std::size_t fork_bytes() const;
    std::size_t token_bytes() const { return tokens_.bytes(); }

  private:
    static constexpr NodeId kFreeNode = 0xfffffffe;

    bool is_fork(std::uint32_t child) const { return child != kNone && (child & kFork) != 0; }
    ChildSet& fork_of(NodeId node) { return forks_[nodes_[node].child & ~kFork]; }
    NodeId new_node();
    std::uint32_t new_fork(NodeId first, NodeId second);
    void free_fork(std::uint32_t child);
    std::uint32_t tag(const std::int32_t* tokens, ItemKey items) const;
    std::uint32_t tag(NodeId node) const { return tag(tokens(node), items(node)); }
    NodeId add_child(NodeId parent, const std::int32_t* tokens, ItemKey items);
    bool equal(NodeId node, const std::int32_t* tokens, ItemKey items) const {
        return equal_tokens(node, tokens) && this->items(node) == items;
    }
    // A constant size lets the compiler inline the usual case.
    bool equal_tokens(NodeId node, const std::int32_t* tokens) const {
        if (stride_ == 16) return std::memcmp(this->tokens(node), tokens, 64) == 0;
        return std::memcmp(this->tokens(node), tokens, stride_ * sizeof(std::int32_t)) == 0;
    }
    void store(NodeId node, const std::int32_t* tokens) {
        std::int32_t* place = &tokens_[std::size_t{node} * stride_];
        if (stride_ == 16) {
            std::memcpy(place, tokens, 64);
        } else {
            std::memcpy(place, tokens, stride_ * sizeof(std::int32_t));
        }
    }

    std::size_t stride_;
    Slab<Node> nodes_;
    Slab<std::int32_t> tokens_;
    std::deque<ChildSet> forks_;
    std::vector<std::uint32_t> free_forks_;
    std::size_t child_bytes_ = 0;  // memory of the tables of all forks
    ItemKeys item_keys_;
    NodeId free_head_ = kNone;
    std::uint32_t live_ = 0;
};

}  // namespace aiokv
