#include "aiokv/prefix_tree.hpp"

#include <utility>

#include "aiokv/error.hpp"

namespace aiokv {

void ChildSet::place(Slot slot) {
    std::size_t i = slot.tag & mask();
    while (slots_[i].node != kNone) i = (i + 1) & mask();
    slots_[i] = slot;
}

void ChildSet::insert(std::uint32_t tag, NodeId node) {
    if (std::size_t{size_} * 2 >= slots_.size()) {
        std::vector<Slot> old(slots_.size() * 2);
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.node != kNone) place(slot);
        }
    }
    place({node, tag});
    ++size_;
}

void ChildSet::erase(std::uint32_t tag, NodeId node) {
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
    size_ = 0;
    device_children = 0;
}

PrefixTree::PrefixTree(std::uint32_t block_tokens, std::size_t expected_nodes,
                       std::size_t populated_nodes)
    : stride_(block_tokens),
      nodes_(expected_nodes, populated_nodes),
      tokens_(expected_nodes * block_tokens, populated_nodes * block_tokens) {}

std::size_t PrefixTree::fork_bytes() const {
    std::size_t bytes = forks_.capacity() * sizeof(ChildSet) + free_forks_.capacity() * 4;
    for (const ChildSet& fork : forks_) bytes += fork.bytes();
    return bytes;
}

std::uint32_t PrefixTree::tag(const std::int32_t* tokens, ItemKey items) const {
    std::uint64_t hash = 0x9e3779b97f4a7c15 ^ items;
    for (std::size_t i = 0; i < stride_; ++i) {
        hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0xff51afd7ed558ccd;
        hash ^= hash >> 29;
    }
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

NodeId PrefixTree::new_slot() {
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
    n.prev = kFreeSlot;
    n.next = free_head_;
    free_head_ = node;
    --live_;
}

NodeId PrefixTree::add_root() {
    const NodeId id = new_slot();
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

NodeId PrefixTree::add_child(NodeId parent, const std::int32_t* tokens, ItemKey items) {
    const NodeId id = new_slot();
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
        forks_[child & ~kFork].insert(tag(tokens, items), id);
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
        forks_.emplace_back();
    } else {
        index = free_forks_.back();
        free_forks_.pop_back();
    }
    ChildSet& fork = forks_[index];
    for (const NodeId node : {first, second}) {
        fork.insert(tag(node), node);
        fork.device_children += nodes_[node].has(kDeviceResident);
    }
    return index | kFork;
}

void PrefixTree::free_fork(std::uint32_t child) {
    forks_[child & ~kFork].clear();
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
    for (const ChildSet::Slot& slot : fork.slots()) {
        if (slot.node != kNone) nodes_[parent].child = slot.node;
    }
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
