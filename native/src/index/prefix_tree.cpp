#include "aiokv/prefix_tree.hpp"

#include <utility>

#include "aiokv/error.hpp"

namespace aiokv {

void ChildSet::place(Slot slot) {
    std::size_t i = slot.tag & mask();
    while (slots_[i].node != kNone) i = (i + 1) & mask();
    slots_[i] = slot;
}

std::size_t ChildSet::bytes() const {
    std::size_t bytes = slots_.capacity() * sizeof(Slot);
    for (std::size_t i = 0; parts_ && i < kParts; ++i)
        bytes += sizeof(ChildSet) + parts_[i].bytes();
    return bytes;
}

// Twice as many slots; or, beyond `max_slots`, parts of few slots each.
std::size_t ChildSet::grow(std::size_t max_slots) {
    const std::size_t before = bytes();
    const bool divides = slots_.size() >= max_slots;
    std::vector<Slot> old(divides ? 0 : slots_.size() * 2);
    old.swap(slots_);
    if (divides) parts_ = std::make_unique<ChildSet[]>(kParts);
    for (const Slot& slot : old) {
        if (slot.node == kNone) continue;
        if (divides) {
            parts_[slot.tag >> kPartShift].insert(slot.tag, slot.node, ~std::size_t{0});
        } else {
            place(slot);
        }
    }
    return bytes() - before;
}

std::size_t ChildSet::insert(std::uint32_t tag, NodeId node, std::size_t max_slots) {
    std::size_t grown = 0;
    if (!parts_ && std::size_t{size_} * 2 >= slots_.size()) grown = grow(max_slots);
    if (parts_) {
        grown += parts_[tag >> kPartShift].insert(tag, node, ~std::size_t{0});
    } else {
        place({node, tag});
    }
    ++size_;
    return grown;
}

void ChildSet::erase(std::uint32_t tag, NodeId node) {
    if (parts_) {
        parts_[tag >> kPartShift].erase(tag, node);
        --size_;
        return;
    }
    std::size_t hole = tag & mask();
    while (slots_[hole].node != node) hole = (hole + 1) & mask();
    // Close the gap: an entry may move back when the gap lies between its home and its place.
    for (std::size_t i = (hole + 1) & mask(); slots_[i].node != kNone; i = (i + 1) & mask()) {
        const std::size_t home = slots_[i].tag & mask();
        if (((i - home) & mask()) >= ((i - hole) & mask())) {
            slots_[hole] = slots_[i];
            hole = i;
        }
    }
    slots_[hole] = Slot{};
    --size_;
}

void ChildSet::clear() {
    slots_.assign(4, Slot{});
    slots_.shrink_to_fit();
    parts_.reset();
    size_ = 0;
    device_children = 0;
}

PrefixTree::PrefixTree(std::uint32_t block_tokens, std::size_t expected_nodes,
                       std::size_t populated_nodes)
    : stride_(block_tokens),
      nodes_(expected_nodes, populated_nodes),
      tokens_(expected_nodes * block_tokens, populated_nodes * block_tokens) {}

std::size_t PrefixTree::fork_bytes() const {
    return forks_.size() * sizeof(ChildSet) + free_forks_.capacity() * 4 + child_bytes_;
}

std::uint32_t PrefixTree::tag(const std::int32_t* tokens, ItemKey items) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15 ^ items;
    for (std::size_t i = 0; i < stride_; ++i) {
        hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0xff51afd7ed558ccd;
        hash ^= hash >> 29;
    }
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

NodeId PrefixTree::new_node() {
    ++live_;
    if (free_head_ != kNone) {
        const NodeId id = free_head_;
        free_head_ = nodes_[id].next;
        nodes_[id] = Node{};
        return id;
    }
    nodes_.grow(1);
    tokens_.grow(stride_);
    const auto id = static_cast<NodeId>(nodes_.size() - 1);
    nodes_[id] = Node{};
    return id;
}

void PrefixTree::free(NodeId node) {
    Node& n = nodes_[node];
    if (n.child != kNone) throw InternalError("a node with children was freed");
    if (n.has(kHasItems)) item_keys_.detach(node);
    n.prev = kFreeNode;
    n.next = free_head_;
    free_head_ = node;
    --live_;
    __builtin_prefetch(tokens(node), 1);  // the next node to be added takes them
}

NodeId PrefixTree::add_root() {
    const NodeId id = new_node();
    nodes_[id].flags = kRoot;
    return id;
}

NodeId PrefixTree::find_child(NodeId parent, const std::int32_t* tokens, ItemKey items) const {
    const std::uint32_t child = nodes_[parent].child;
    if (child == kNone) return kNone;
    if ((child & kFork) == 0) return equal(child, tokens, items) ? child : kNone;
    return forks_[child & ~kFork].find(tag(tokens, items),
                                       [&](NodeId node) { return equal(node, tokens, items); });
}

// Inline: called per published block.
inline NodeId PrefixTree::add_child(NodeId parent, const std::int32_t* tokens, ItemKey items) {
    const NodeId id = new_node();
    nodes_[id].parent = parent;
    store(id, tokens);
    if (items != kNoItems) {
        nodes_[id].set(kHasItems);
        item_keys_.attach(id, items);
    }
    const std::uint32_t child = nodes_[parent].child;
    if (child == kNone) {
        nodes_[parent].child = id;
    } else if ((child & kFork) != 0) {
        child_bytes_ += forks_[child & ~kFork].insert(tag(tokens, items), id);
    } else {
        nodes_[parent].child = new_fork(child, id);
    }
    return id;
}

PrefixTree::Found PrefixTree::find_or_add_child(NodeId parent, const std::int32_t* tokens,
                                                ItemKey items) {
    const NodeId child = find_child(parent, tokens, items);
    if (child != kNone) return {child, false};
    return {add_child(parent, tokens, items), true};
}

std::uint32_t PrefixTree::new_fork(NodeId first, NodeId second) {
    std::uint32_t index = static_cast<std::uint32_t>(forks_.size());
    if (free_forks_.empty()) {
        child_bytes_ += forks_.emplace_back().bytes();
    } else {
        index = free_forks_.back();
        free_forks_.pop_back();
    }
    ChildSet& fork = forks_[index];
    for (const NodeId node : {first, second}) {
        child_bytes_ += fork.insert(tag(node), node);
        fork.device_children += nodes_[node].has(kDeviceResident);
    }
    return index | kFork;
}

void PrefixTree::free_fork(std::uint32_t child) {
    ChildSet& fork = forks_[child & ~kFork];
    child_bytes_ -= fork.bytes();
    fork.clear();
    child_bytes_ += fork.bytes();
    free_forks_.push_back(child & ~kFork);
}

void PrefixTree::unlink(NodeId node) {
    const NodeId parent = nodes_[node].parent;
    const std::uint32_t child = nodes_[parent].child;
    nodes_[node].parent = kNone;
    if (!is_fork(child)) {
        nodes_[parent].child = kNone;
        return;
    }
    ChildSet& fork = forks_[child & ~kFork];
    fork.erase(tag(node), node);
    fork.device_children -= nodes_[node].has(kDeviceResident);
    if (fork.size() > 1) return;
    fork.for_each([&](NodeId child) { nodes_[parent].child = child; });
    free_fork(child);
}

void PrefixTree::forget_children(NodeId node) {
    const std::uint32_t child = nodes_[node].child;
    if (is_fork(child)) free_fork(child);
    nodes_[node].child = kNone;
}

void PrefixTree::count_device_child(NodeId node, int change) {
    const NodeId parent = nodes_[node].parent;
    if (parent == kNone || !is_fork(nodes_[parent].child)) return;
    ChildSet& fork = fork_of(parent);
    fork.device_children += static_cast<std::uint32_t>(change);
}

bool PrefixTree::has_device_child(NodeId node) const {
    const std::uint32_t child = nodes_[node].child;
    if (child == kNone) return false;
    if ((child & kFork) == 0) return nodes_[child].has(kDeviceResident);
    return forks_[child & ~kFork].device_children > 0;
}

std::uint32_t PrefixTree::device_children(NodeId node) const {
    const std::uint32_t child = nodes_[node].child;
    return is_fork(child) ? forks_[child & ~kFork].device_children : has_device_child(node);
}

std::uint32_t PrefixTree::children(NodeId node) const {
    const std::uint32_t child = nodes_[node].child;
    return is_fork(child) ? forks_[child & ~kFork].size() : child != kNone;
}

}  // namespace aiokv
