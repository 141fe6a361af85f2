#include "aiokv/prefix_tree.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "aiokv/cache_lines.hpp"
#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

namespace {

void append_nodes(NodeId first, std::size_t count, std::vector<NodeId>& path) {
    path.resize(path.size() + count);
    std::iota(path.end() - static_cast<std::ptrdiff_t>(count), path.end(), first);
}

}  // namespace

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

// Doubles the number of slots or, if there are `max_slots`, divides the set into parts of few
// slots.
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
    // Closes the gap: an entry moves into it if the gap is between the entry's first slot and its
    // present one.
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
      tokens_(expected_nodes * block_tokens, populated_nodes * block_tokens),
      run_of_(expected_nodes, populated_nodes),
      runs_(expected_nodes) {}

std::size_t PrefixTree::fork_bytes() const {
    return forks_.size() * sizeof(ChildSet) + free_forks_.capacity() * 4 + child_bytes_;
}

// Hashes two tokens at a time, into two sums that do not wait for one another.
std::uint32_t PrefixTree::tag(const std::int32_t* tokens, ItemKey items) const {
    std::uint64_t even = 0x9e3779b97f4a7c15 ^ items;
    std::uint64_t odd = 0xc2b2ae3d27d4eb4f;
    const auto mix = [](std::uint64_t& sum, const std::int32_t* from, std::size_t count) {
        std::uint64_t word = 0;
        std::memcpy(&word, from, count * sizeof(std::int32_t));
        sum = (sum ^ word) * 0xff51afd7ed558ccd;
        sum ^= sum >> 29;
    };
    std::size_t i = 0;
    for (; i + 4 <= stride_; i += 4) {
        mix(even, tokens + i, 2);
        mix(odd, tokens + i + 2, 2);
    }
    for (; i < stride_; ++i) mix(even, tokens + i, 1);
    const std::uint64_t hash = (even ^ (odd >> 32 | odd << 32)) * 0x9e3779b97f4a7c15;
    return static_cast<std::uint32_t>(hash ^ (hash >> 32));
}

// -- slots -----------------------------------------------------------------------------------

// Takes the lowest free slots that are consecutive: at least one, at most `count`.
BlockPool::Extent PrefixTree::take_slots(std::size_t count) {
    if (free_slots_.free_blocks() == 0) {
        nodes_.grow(count);
        tokens_.grow(count * stride_);
        run_of_.grow(count);
        free_slots_.resize(static_cast<std::uint32_t>(nodes_.size()));
    }
    const BlockPool::Extent extent = free_slots_.take_extent(static_cast<std::uint32_t>(count));
    live_ += extent.count;
    std::fill_n(&nodes_[static_cast<std::size_t>(extent.first)], extent.count, Node{});
    return extent;
}

void PrefixTree::free_slots(NodeId first, std::uint32_t count) {
    for (NodeId node = first; item_keys_.nodes() > 0 && node < first + count; ++node) {
        if (nodes_[node].has(kHasItems)) item_keys_.detach(node);
    }
    free_slots_.give_back({static_cast<BlockId>(first), count});
    live_ -= count;
}

// -- runs ------------------------------------------------------------------------------------

void PrefixTree::label(RunId id) {
    std::fill_n(&run_of_[runs_[id].first], runs_[id].length, id);
}

RunId PrefixTree::open_run(NodeId first, std::uint32_t length, NodeId parent) {
    RunId id = free_run_;
    if (id == kNoRun) {
        runs_.grow(1);
        id = static_cast<RunId>(runs_.size() - 1);
    } else {
        free_run_ = runs_[id].next;
    }
    runs_[id] = Run{.first = first, .length = length, .parent = parent};
    return id;
}

void PrefixTree::close_run(RunId id) {
    runs_[id] = Run{.next = free_run_};
    free_run_ = id;
}

// Splits a run before its block `lower`, which is not the first one. Returns the run that begins
// with `lower`. The shorter part gets the new run, so that fewer slots change their run.
RunId PrefixTree::split(RunId id, NodeId lower) {
    const RunId made = open_run(kNone, 0, kNone);
    Run& old = runs_[id];
    const std::uint32_t above = lower - old.first;
    const std::uint32_t below = old.length - above;
    const bool made_is_above = above <= below;
    runs_[made] = old;
    const RunId upper_id = made_is_above ? made : id;
    const RunId lower_id = made_is_above ? id : made;
    Run& upper = runs_[upper_id];
    upper.length = above;
    const bool is_detached = nodes_[lower - 1].has(kDetached);
    upper.child = is_detached ? kNone : lower;
    Run& rest = runs_[lower_id];
    rest.first = lower;
    rest.length = below;
    rest.parent = is_detached ? kNone : lower - 1;
    label(made);
    if (old.has(kQueued)) listener_->on_split(id, made, made_is_above);
    return lower_id;
}

void PrefixTree::join(RunId above, RunId below, RunId keep) {
    const Run upper = runs_[above];
    const Run lower = runs_[below];
    const RunId gone = keep == above ? below : above;
    std::fill_n(&run_of_[runs_[gone].first], runs_[gone].length, keep);
    close_run(gone);
    Run& run = runs_[keep];
    run.first = upper.first;
    run.length = upper.length + lower.length;
    run.parent = upper.parent;
    run.child = lower.child;
    run.set(upper.flags | lower.flags);
    if (!upper.has(kOnDevice) || !lower.has(kOnDevice)) run.clear(kOnDevice);
}

bool PrefixTree::has_class(std::span<const NodeId> path, ReuseClass reuse_class) const {
    for (std::size_t i = 0; i < path.size();) {
        const Run& run = this->run(path[i]);
        if (run.reuse_class != reuse_class) return false;
        i += run.last() - path[i] + 1;
    }
    return true;
}

// -- shape -----------------------------------------------------------------------------------

NodeId PrefixTree::add_root() {
    const auto id = static_cast<NodeId>(take_slots(1).first);
    nodes_[id].set(kRoot);
    run_of_[id] = open_run(id, 1, kNone);
    return id;
}

NodeId PrefixTree::find_child(NodeId parent, const std::int32_t* tokens, ItemKey items) const {
    const std::uint32_t child = child_of(parent);
    if (child == kNone) return kNone;
    const auto matches = [&](NodeId node) {
        __builtin_prefetch(&run_of_[node]);  // read next if it matches, like the node
        __builtin_prefetch(&nodes_[node]);
        return equal(node, tokens, items);
    };
    if ((child & kFork) == 0) return matches(child) ? child : kNone;
    return forks_[child & ~kFork].find(tag(tokens, items), matches);
}

// Returns how many consecutive slots from `first` on hold these tokens and items, at most `count`.
std::size_t PrefixTree::equal_blocks(NodeId first, const std::int32_t* tokens,
                                     std::span<const ItemKey> items, std::size_t count) const {
    constexpr std::size_t kAtOnce = 32;
    std::size_t equal = 0;
    while (equal < count) {
        const std::size_t some = std::min(kAtOnce, count - equal);
        const std::size_t bytes = some * stride_ * sizeof(std::int32_t);
        const auto node = static_cast<NodeId>(first + equal);
        if (std::memcmp(this->tokens(node), tokens + equal * stride_, bytes) != 0) break;
        equal += some;
    }
    const std::size_t end = std::min(count, equal + kAtOnce);
    while (equal < end &&
           equal_tokens(static_cast<NodeId>(first + equal), tokens + equal * stride_)) {
        ++equal;
    }
    if (items.empty() && item_keys_.nodes() == 0) return equal;
    std::size_t same = 0;
    while (same < equal && this->items(static_cast<NodeId>(first + same)) == key_of(items, same)) {
        ++same;
    }
    return same;
}

std::size_t PrefixTree::find_path(NodeId above, const std::int32_t* tokens,
                                  std::span<const ItemKey> items, std::size_t limit,
                                  std::vector<NodeId>& path) const {
    path.reserve(path.size() + limit);
    std::size_t known = 0;
    while (known < limit) {
        const NodeId last = run(above).last();
        const std::int32_t* next = tokens + known * stride_;
        if (above == last) {
            above = find_child(above, next, key_of(items, known));
            if (above == kNone) break;
            path.push_back(above);
            ++known;
            continue;
        }
        const std::size_t most = std::min<std::size_t>(last - above, limit - known);
        const std::size_t equal = equal_blocks(above + 1, next, keys_from(items, known), most);
        append_nodes(above + 1, equal, path);
        above += static_cast<NodeId>(equal);
        known += equal;
        if (equal < most) break;
    }
    return known;
}

// Adds a node, which holds `tokens`, to the children of the parent that its run names.
void PrefixTree::link(NodeId node, const std::int32_t* tokens) {
    const NodeId parent = run(node).parent;
    split_after(parent);
    std::uint32_t& child = run(parent).child;
    if (child == kNone) {
        child = node;
        return;
    }
    if (!is_fork(child)) child = new_fork(child);
    child_bytes_ += forks_[child & ~kFork].insert(tag(tokens, items(node)), node);
}

void PrefixTree::add_chain(NodeId parent, const std::int32_t* tokens,
                           std::span<const ItemKey> items, std::size_t count,
                           std::vector<NodeId>& path) {
    for (std::size_t added = 0; added < count;) {
        const BlockPool::Extent extent = take_slots(count - added);
        const auto first = static_cast<NodeId>(extent.first);
        const std::int32_t* source = tokens + added * stride_;
        // The next match of these blocks is far away, so their tokens bypass the caches.
        copy_bytes(&tokens_[std::size_t{first} * stride_], source,
                   extent.count * stride_ * sizeof(std::int32_t), true);
        for (std::size_t i = 0; i < extent.count && added + i < items.size(); ++i) {
            if (items[added + i] == kNoItems) continue;
            nodes_[first + i].set(kHasItems);
            item_keys_.attach(static_cast<NodeId>(first + i), items[added + i]);
        }
        label(open_run(first, extent.count, parent));
        link(first, source);
        append_nodes(first, extent.count, path);
        parent = first + extent.count - 1;
        added += extent.count;
    }
    streaming_fence();
}

void PrefixTree::find_or_add_path(NodeId above, const std::int32_t* tokens,
                                  std::span<const ItemKey> items, std::size_t count,
                                  std::vector<NodeId>& path) {
    const std::size_t known = find_path(above, tokens, items, count, path);
    if (known > 0) above = path.back();
    add_chain(above, tokens + known * stride_, keys_from(items, known), count - known, path);
}

PrefixTree::Found PrefixTree::find_or_add_child(NodeId parent, const std::int32_t* tokens,
                                                ItemKey items) {
    const NodeId child = find_child(parent, tokens, items);
    if (child != kNone) return {child, false};
    std::vector<NodeId> added;
    add_chain(parent, tokens, {&items, 1}, 1, added);
    return {added.front(), true};
}

std::uint32_t PrefixTree::new_fork(NodeId only_child) {
    std::uint32_t index = static_cast<std::uint32_t>(forks_.size());
    if (free_forks_.empty()) {
        child_bytes_ += forks_.emplace_back().bytes();
    } else {
        index = free_forks_.back();
        free_forks_.pop_back();
    }
    ChildSet& fork = forks_[index];
    if (fork.size() > 0) clear_fork(fork);  // clear() has left it
    child_bytes_ += fork.insert(tag(only_child), only_child);
    fork.device_children = nodes_[only_child].has(kDeviceResident);
    return index | kFork;
}

void PrefixTree::clear_fork(ChildSet& fork) {
    child_bytes_ -= fork.bytes();
    fork.clear();
    child_bytes_ += fork.bytes();
}

void PrefixTree::free_fork(std::uint32_t child) {
    clear_fork(forks_[child & ~kFork]);
    free_forks_.push_back(child & ~kFork);
}

void PrefixTree::unlink(NodeId node) {
    split_before(node);
    const NodeId parent = std::exchange(run(node).parent, kNone);
    std::uint32_t& child = run(parent).child;
    if (!is_fork(child)) {
        child = kNone;
        return;
    }
    ChildSet& fork = forks_[child & ~kFork];
    fork.erase(tag(node), node);
    fork.device_children -= nodes_[node].has(kDeviceResident);
    if (fork.size() > 1) return;
    const std::uint32_t set = child;
    fork.for_each([&](NodeId only) { child = only; });
    free_fork(set);
}

void PrefixTree::forget_children(NodeId node) {
    Run& run = this->run(node);
    if (run.first == node) run.parent = kNone;
    if (run.last() != node) return;
    if (is_fork(run.child)) free_fork(run.child);
    run.child = kNone;
}

void PrefixTree::free(NodeId node) {
    if (has_child(node)) throw InternalError("a node with children was freed");
    if (const Run& whole = run(node); whole.first < node && node < whole.last()) {
        split_before(node);
        run(node - 1).child = kNone;
    }
    const RunId id = run_of_[node];
    Run& run = runs_[id];
    if (run.last() != node) {
        ++run.first;
        run.parent = kNone;
    }
    free_slots(node, 1);
    if (--run.length == 0) close_run(id);
}

void PrefixTree::free_run(RunId id) {
    const Run run = runs_[id];
    if (is_fork(run.child)) free_fork(run.child);
    free_slots(run.first, run.length);
    close_run(id);
}

void PrefixTree::clear(std::span<const NodeId> roots) {
    item_keys_.detach_all();
    const std::vector<BlockId> slots(roots.begin(), roots.end());
    free_slots_.free_all_but(slots);
    live_ = static_cast<std::uint32_t>(roots.size());
    runs_.clear();
    free_run_ = kNoRun;
    for (const NodeId root : roots) run_of_[root] = open_run(root, 1, kNone);
    free_forks_.resize(forks_.size());  // new_fork() clears them
    std::iota(free_forks_.rbegin(), free_forks_.rend(), 0);
}

void PrefixTree::trim(RunId id, std::uint32_t count) {
    Run& run = runs_[id];
    if (run.child != kNone) throw InternalError("a node with children was freed");
    if (count == run.length) unlink(run.first);
    free_slots(run.last() - count + 1, count);
    run.length -= count;
    if (run.length == 0) close_run(id);
}

void PrefixTree::check(Report& report) const {
    for (NodeId node = 0; node < end_id(); ++node) {
        if (!is_live(node)) continue;
        const Run& run = this->run(node);
        report.require(run.first <= node && node <= run.last(), "I2: node ", node,
                       " is not in its run");
        if (node != run.last() || nodes_[node].has(kDetached)) continue;
        for_each_child(node, [&](NodeId child) {
            report.require(parent(child) == node, "I2: node ", child, " has another parent than ",
                           node);
        });
    }
}

}  // namespace aiokv
