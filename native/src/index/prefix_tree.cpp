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

// Returns the two halves of the product, one folded onto the other.
std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

void ChildSet::place(Slot slot) {
    std::size_t i = slot.tag & mask();
    const std::span<Slot> slots = this->slots();
    while (slots[i].node != kNone) i = (i + 1) & mask();
    slots[i] = slot;
}

std::size_t ChildSet::bytes() const {
    std::size_t bytes = more_ ? capacity_ * sizeof(Slot) : 0;
    for (std::size_t i = 0; parts_ && i < kParts; ++i)
        bytes += sizeof(ChildSet) + parts_[i].bytes();
    return bytes;
}

// Doubles the number of slots or, if there are `max_slots`, divides the set into parts of few
// slots.
std::size_t ChildSet::grow(std::size_t max_slots) {
    const std::size_t before = bytes();
    const bool divides = capacity_ >= max_slots;
    const std::vector<Slot> old(slots().begin(), slots().end());
    capacity_ = divides ? 0 : capacity_ * 2;
    more_ = divides ? nullptr : std::make_unique<Slot[]>(capacity_);
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
    if (!parts_ && std::size_t{size_} * 2 >= capacity_) grown = grow(max_slots);
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
    const std::span<Slot> slots = this->slots();
    std::size_t hole = tag & mask();
    while (slots[hole].node != node) hole = (hole + 1) & mask();
    // Closes the gap: an entry moves into it if the gap is between the entry's first slot and its
    // present one.
    for (std::size_t i = (hole + 1) & mask(); slots[i].node != kNone; i = (i + 1) & mask()) {
        const std::size_t home = slots[i].tag & mask();
        if (((i - home) & mask()) >= ((i - hole) & mask())) {
            slots[hole] = slots[i];
            hole = i;
        }
    }
    slots[hole] = Slot{};
    --size_;
}

void ChildSet::clear() {
    *this = ChildSet();
}

PrefixTree::PrefixTree(std::uint32_t block_tokens, std::size_t expected_nodes,
                       std::size_t populated_nodes, std::uint32_t history_blocks)
    : stride_(block_tokens),
      nodes_(expected_nodes, populated_nodes),
      tokens_(expected_nodes * block_tokens, populated_nodes * block_tokens),
      run_of_(expected_nodes, populated_nodes),
      runs_(expected_nodes),
      evicted_(history_blocks) {}

std::size_t PrefixTree::fork_bytes() const {
    return forks_.size() * kForks * sizeof(ChildSet) + free_forks_.capacity() * 4 + child_bytes_;
}

// Hashes four tokens per multiplication, into two sums that do not wait for one another.
std::uint32_t PrefixTree::tag(const std::int32_t* tokens, ItemKey items) const {
    constexpr std::uint64_t kFactor = 0xff51afd7ed558ccd;
    std::uint64_t even = 0x9e3779b97f4a7c15 ^ items;
    std::uint64_t odd = 0xc2b2ae3d27d4eb4f;
    const auto word = [tokens](std::size_t at, std::size_t count) {
        std::uint64_t word = 0;
        std::memcpy(&word, tokens + at, count * sizeof(std::int32_t));
        return word;
    };
    std::size_t i = 0;
    for (; i + 8 <= stride_; i += 8) {
        even = folded(even ^ word(i, 2), kFactor ^ word(i + 2, 2));
        odd = folded(odd ^ word(i + 4, 2), kFactor ^ word(i + 6, 2));
    }
    for (; i < stride_; ++i) even = folded(even ^ word(i, 1), kFactor);
    return static_cast<std::uint32_t>(folded(even ^ kFactor, odd ^ 0x9e3779b97f4a7c15));
}

// -- slots -----------------------------------------------------------------------------------

// Takes the lowest free slots that are consecutive: at least one, at most `count`.
BlockPool::Extent PrefixTree::take_slots(std::size_t count) {
    if (has_orphans_) forget_orphans();
    if (free_slots_.free_blocks() == 0) {
        nodes_.grow(count);
        tokens_.grow(count * stride_);
        run_of_.grow(count);
        free_slots_.resize(static_cast<std::uint32_t>(nodes_.size()));
    }
    const BlockPool::Extent extent = free_slots_.take_extent(static_cast<std::uint32_t>(count));
    live_ += extent.count;
    std::fill_n(&nodes_[static_cast<std::size_t>(extent.first)], extent.count, Node{});
    evicted_.forget_children(static_cast<NodeId>(extent.first), extent.count);
    return extent;
}

void PrefixTree::free_slots(NodeId first, std::uint32_t count) {
    for (NodeId node = first; item_keys_.nodes() > 0 && node < first + count; ++node) {
        if (nodes_[node].has(kHasItems)) item_keys_.detach(node);
    }
    free_slots_.give_back({static_cast<BlockId>(first), count});
    live_ -= count;
}

// -- history ---------------------------------------------------------------------------------

std::uint32_t PrefixTree::evicted_tag(NodeId node, NodeId parent, std::uint32_t hash) const {
    if (!evicted_.is_above(parent)) return EvictedRuns::kFirst;
    return hash != 0 ? hash : tag(node);
}

void PrefixTree::retire(NodeId first, std::uint32_t count, NodeId parent, std::uint32_t hash) {
    if (count > evicted_.limit()) {
        has_orphans_ = has_orphans_ || evicted_.blocks() > 0;
        return free_slots(first, count);
    }
    live_ -= count;
    evicted_.add(first, count, parent, nodes_[parent].has(kRoot), evicted_tag(first, parent, hash));
    while (evicted_.blocks() > evicted_.limit()) forget_evicted(evicted_.oldest());
}

BlockPool::Extent PrefixTree::copy_slots(NodeId first, std::uint32_t count) {
    const BlockPool::Extent copy = take_slots(count);
    const auto to = static_cast<NodeId>(copy.first);
    std::copy_n(tokens(first), copy.count * stride_, &tokens_[std::size_t{to} * stride_]);
    for (NodeId i = 0; i < copy.count; ++i) {
        if (!nodes_[first + i].has(kHasItems)) continue;
        nodes_[to + i].set(kHasItems);
        item_keys_.attach(to + i, items(first + i));
    }
    return copy;
}

void PrefixTree::forget_evicted(RunId id) {
    const EvictedRuns::Run run = evicted_[id];
    evicted_.remove(id);
    live_ += run.length;
    free_slots(run.first, run.length);
}

void PrefixTree::forget_history() {
    while (evicted_.blocks() > 0) forget_evicted(evicted_.oldest());
    has_orphans_ = false;
}

// Forgets the runs below freed blocks, before the slots of these get other tokens.
void PrefixTree::forget_orphans() {
    has_orphans_ = false;
    for (RunId id = evicted_.newest(); id != kNoRun;) {
        const RunId older = evicted_[id].older;
        if (free_slots_.is_free(static_cast<BlockId>(evicted_[id].parent))) forget_evicted(id);
        id = older;
    }
}

PrefixTree::EvictedPart PrefixTree::find_evicted(NodeId parent, const std::int32_t* tokens,
                                                 std::span<const ItemKey> items,
                                                 std::size_t limit) const {
    if (limit == 0 || !evicted_.is_above(parent)) return {};
    const ItemKey key = key_of(items, 0);
    const auto matches = [&](NodeId first) { return equal(first, tokens, key); };
    RunId id = evicted_.find(parent, EvictedRuns::kFirst, matches);
    if (id == kNoRun) id = evicted_.find(parent, tag(tokens, key), matches);
    if (id == kNoRun) return {};
    const EvictedRuns::Run& run = evicted_[id];
    const auto most = std::min<std::size_t>(run.length, limit);
    return {id, static_cast<std::uint32_t>(equal_blocks(run.first, tokens, items, most))};
}

// Takes the slots of evicted blocks with these tokens out of the history: at most `count`.
BlockPool::Extent PrefixTree::revive(NodeId parent, const std::int32_t* tokens,
                                     std::span<const ItemKey> items, std::size_t count) {
    const EvictedPart part = find_evicted(parent, tokens, items, count);
    if (part.blocks == 0) return {0, 0};
    const EvictedRuns::Run run = evicted_[part.run];
    const NodeId next = run.first + part.blocks;
    evicted_.take_front(part.run, part.blocks,
                        part.blocks < run.length ? evicted_tag(next, next - 1) : 0);
    live_ += part.blocks;
    for (NodeId slot = run.first; slot < next; ++slot) {
        const std::uint16_t kept = nodes_[slot].has(kHasItems) ? kHasItems : 0;
        nodes_[slot] = Node{};
        nodes_[slot].set(kept);
    }
    return {static_cast<BlockId>(run.first), part.blocks};
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
    if (parent != kNone) runs_[id].share = run(parent).share;
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

void PrefixTree::classify(std::span<const NodeId> path, ReuseClass reuse_class) {
    while (!path.empty()) {
        const auto part = first_part(path);
        path = path.subspan(part.size());
        if (run(part.front()).reuse_class == reuse_class) continue;
        split_before(part.front());
        runs_[split_after(part.back())].reuse_class = reuse_class;
    }
}

// -- shape -----------------------------------------------------------------------------------

NodeId PrefixTree::add_root(std::uint32_t share) {
    const auto id = static_cast<NodeId>(take_slots(1).first);
    nodes_[id].set(kRoot);
    run_of_[id] = open_run(id, 1, kNone);
    run(id).share = share;
    return id;
}

NodeId PrefixTree::find_child(NodeId parent, const std::int32_t* tokens, ItemKey items) const {
    return find_in(child_of(parent), tokens, items);
}

inline NodeId PrefixTree::find_in(std::uint32_t child, const std::int32_t* tokens,
                                  ItemKey items) const {
    if (child == kNone) return kNone;
    const auto matches = [&](NodeId node) {
        __builtin_prefetch(&run_of_[node]);  // read next if it matches
        return equal(node, tokens, items);
    };
    if ((child & kFork) == 0) return matches(child) ? child : kNone;
    return fork(child).find(tag(tokens, items), matches);
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

PrefixTree::FoundPath PrefixTree::find_path(NodeId above, const std::int32_t* tokens,
                                            std::span<const ItemKey> items, std::size_t limit,
                                            std::vector<NodeId>& path) const {
    FoundPath found;
    RunId run_id = run_of_[above];
    while (found.blocks < limit) {
        const Run& run = runs_[run_id];
        const std::int32_t* next = tokens + found.blocks * stride_;
        if (above == run.last()) {
            above = find_in(run.child, next, key_of(items, found.blocks));
            if (above == kNone) break;
            path.push_back(above);
            ++found.blocks;
            found.on_device += nodes_[above].has(kDeviceValid);
            run_id = run_of_[above];
            continue;
        }
        const auto most = std::min<std::size_t>(run.last() - above, limit - found.blocks);
        const std::size_t equal =
            equal_blocks(above + 1, next, keys_from(items, found.blocks), most);
        append_nodes(above + 1, equal, path);
        found.blocks += equal;
        found.on_device += count_on_device(run, std::span(path).last(equal), kDeviceValid);
        if (equal < most) break;
        above += static_cast<NodeId>(equal);
    }
    return found;
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
    child_bytes_ += fork(child).insert(tag(tokens, items(node)), node);
}

void PrefixTree::add_chain(NodeId parent, const std::int32_t* tokens,
                           std::span<const ItemKey> items, std::size_t count,
                           std::vector<NodeId>& path) {
    for (std::size_t added = 0; added < count;) {
        const std::int32_t* source = tokens + added * stride_;
        BlockPool::Extent extent = revive(parent, source, keys_from(items, added), count - added);
        const bool is_new = extent.count == 0;
        if (is_new) extent = take_slots(count - added);
        const auto first = static_cast<NodeId>(extent.first);
        // The next match of these blocks is far away, so their tokens bypass the caches.
        if (is_new) {
            copy_bytes(&tokens_[std::size_t{first} * stride_], source,
                       extent.count * stride_ * sizeof(std::int32_t), true);
        }
        for (std::size_t i = 0; is_new && i < extent.count && added + i < items.size(); ++i) {
            if (items[added + i] == kNoItems) continue;
            nodes_[first + i].set(kHasItems);
            item_keys_.attach(static_cast<NodeId>(first + i), items[added + i]);
        }
        label(open_run(first, extent.count, parent));
        link(first, source);
        if (nodes_[parent].has(kRoot)) evicted_.note_first_token(*source);
        append_nodes(first, extent.count, path);
        parent = first + extent.count - 1;
        added += extent.count;
    }
    streaming_fence();
}

std::size_t PrefixTree::find_or_add_path(NodeId above, const std::int32_t* tokens,
                                         std::span<const ItemKey> items, std::size_t count,
                                         std::vector<NodeId>& path) {
    const std::size_t known = find_path(above, tokens, items, count, path).blocks;
    if (known > 0) above = path.back();
    add_chain(above, tokens + known * stride_, keys_from(items, known), count - known, path);
    return known;
}

std::uint32_t PrefixTree::new_fork(NodeId only_child) {
    std::uint32_t index = end_fork_;
    if (free_forks_.empty()) {
        if (end_fork_++ % kForks == 0) forks_.push_back(std::make_unique<ChildSet[]>(kForks));
    } else {
        index = free_forks_.back();
        free_forks_.pop_back();
    }
    ChildSet& fork = this->fork(index);
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
    clear_fork(fork(child));
    free_forks_.push_back(child & ~kFork);
}

std::uint32_t PrefixTree::unlink(NodeId node) {
    split_before(node);
    const NodeId parent = std::exchange(run(node).parent, kNone);
    std::uint32_t& child = run(parent).child;
    if (!is_fork(child)) {
        child = kNone;
        return 0;
    }
    ChildSet& fork = this->fork(child);
    const std::uint32_t hash = tag(node);
    fork.erase(hash, node);
    fork.device_children -= nodes_[node].has(kDeviceResident);
    if (fork.size() > 1) return hash;
    const std::uint32_t set = child;
    fork.for_each([&](NodeId only) { child = only; });
    free_fork(set);
    return hash;
}

void PrefixTree::forget_children(NodeId node) {
    Run& run = this->run(node);
    if (run.first == node) run.parent = kNone;
    if (run.last() != node) return;
    if (is_fork(run.child)) free_fork(run.child);
    run.child = kNone;
}

void PrefixTree::free(NodeId node, NodeId evicted_from) {
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
    if (--run.length == 0) close_run(id);
    if (evicted_from != kNone) return retire(node, 1, evicted_from);
    has_orphans_ = has_orphans_ || evicted_.is_above(node);
    free_slots(node, 1);
}

void PrefixTree::free_run(RunId id, bool keeps_slots) {
    const Run run = runs_[id];
    if (is_fork(run.child)) free_fork(run.child);
    close_run(id);
    if (keeps_slots) return;
    has_orphans_ = has_orphans_ || evicted_.blocks() > 0;
    free_slots(run.first, run.length);
}

void PrefixTree::clear(std::span<const NodeId> roots, std::span<const RunId> kept) {
    item_keys_.detach_all();
    evicted_.clear();
    has_orphans_ = false;
    std::vector<Run> runs;
    for (const NodeId root : roots) {
        Run bare{.first = root, .length = 1};
        bare.share = run(root).share;
        runs.push_back(bare);
    }
    for (const RunId id : kept) runs.push_back(runs_[id]);
    std::vector<BlockId> slots;
    for (const Run& run : runs) {
        for (NodeId node = run.first; node <= run.last(); ++node) {
            slots.push_back(static_cast<BlockId>(node));
        }
    }
    free_slots_.free_all_but(slots);
    live_ = static_cast<std::uint32_t>(slots.size());
    runs_.clear();
    free_run_ = kNoRun;
    for (const Run& run : runs) {
        const RunId id = open_run(run.first, run.length, kNone);
        runs_[id].refs = run.refs;
        runs_[id].share = run.share;
        runs_[id].set(run.flags & kOnDevice);
        label(id);
    }
    free_forks_.resize(end_fork_);  // new_fork() clears them
    std::iota(free_forks_.rbegin(), free_forks_.rend(), 0);
}

void PrefixTree::trim(RunId id, std::uint32_t count) {
    Run& run = runs_[id];
    if (run.child != kNone) throw InternalError("a node with children was freed");
    const NodeId first = run.last() - count + 1;
    const NodeId parent = count == run.length ? run.parent : first - 1;
    const std::uint32_t hash = count == run.length ? unlink(run.first) : 0;
    run.length -= count;
    if (run.length == 0) close_run(id);
    retire(first, count, parent, hash);
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
    std::uint32_t blocks = 0;
    evicted_.for_each([&](const EvictedRuns::Run& run) {
        blocks += run.length;
        report.require(has_orphans_ || !free_slots_.is_free(static_cast<BlockId>(run.parent)),
                       "I2: evicted node ", run.first, " is below a freed one");
        report.require(find_child(run.parent, tokens(run.first), items(run.first)) == kNone ||
                           !is_live(run.parent),
                       "I2: node ", run.first, " is evicted and in the tree");
    });
    report.require(blocks == evicted_.blocks() && blocks <= evicted_.limit() &&
                       live_ + blocks + free_slots_.free_blocks() == free_slots_.capacity(),
                   "I1: ", live_, " nodes and ", blocks, " evicted ones");
}

}  // namespace aiokv
