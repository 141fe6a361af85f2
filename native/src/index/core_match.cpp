// Matching, and the promises of what will be computed.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

Hit Core::match(Tokens tokens, std::string_view context, bool reads, bool writes,
                std::span<const Item> items) {
    if (tokens.empty()) throw UsageError("cannot match an empty prompt");
    if (tokens.size() > static_cast<std::size_t>(kMaxTokens)) {
        throw UsageError("a prompt of " + str(tokens.size()) + " tokens is too long");
    }
    check_items(items, tokens.size());
    require_lease_slot();
    const LeaseId id = open_lease(tokens, open_context(context), reads, writes);
    Lease& lease = leases_[static_cast<std::uint32_t>(id)];
    if (!items.empty()) set_items(lease, items);
    walk(lease);
    touch(lease.path);
    if (has_sides()) touch_sides(lease.path);
    return {id, lease.device_hit, lease.host_hit};
}

std::size_t Core::hit_limit(const Lease& lease) const {
    if (!lease.reads) return 0;
    return lease.whole ? lease.tokens.size() / config_.block_tokens
                       : border_before(lease.tokens.size());
}

// The last block border at which a prompt of `length` tokens may be hit.
std::size_t Core::border_before(std::size_t length) const {
    if (length < config_.leave_tokens) return 0;
    return (length - config_.leave_tokens) / config_.block_tokens;
}

void Core::set_items(Lease& lease, std::span<const Item> items) {
    for (std::string& bytes : item_key_bytes(items, config_.block_tokens)) {
        const bool none = bytes.empty();
        lease.item_keys.push_back(none ? kNoItems : tree_.item_keys().intern(std::move(bytes)));
    }
    for (const Item& item : items) {
        const auto start = static_cast<std::uint64_t>(item.offset);
        lease.items.push_back({start, start + static_cast<std::uint64_t>(item.length)});
    }
}

void Core::forget_items(Lease& lease) {
    for (const ItemKey key : lease.item_keys) {
        if (key != kNoItems) tree_.item_keys().unref(key);
    }
    lease.item_keys.clear();
    lease.items.clear();
}

// Positions from `num_tokens` on, which is inside no item, are not the lease's any more: what is
// appended there has no items.
void Core::cut_items(Lease& lease, std::uint32_t num_tokens) {
    while (!lease.items.empty() && lease.items.back().start >= num_tokens) lease.items.pop_back();
    ItemKeys& keys = tree_.item_keys();
    const std::size_t whole = num_tokens / config_.block_tokens;
    ItemKey last = kNoItems;  // of the block that is cut
    if (const ItemKey old = key_of(lease.item_keys, whole); old != kNoItems) {
        std::string bytes = item_key_before(keys.bytes(old), num_tokens % config_.block_tokens);
        if (!bytes.empty()) last = keys.intern(std::move(bytes));
    }
    for (std::size_t block = whole; block < lease.item_keys.size(); ++block) {
        if (lease.item_keys[block] != kNoItems) keys.unref(lease.item_keys[block]);
    }
    lease.item_keys.resize(std::min(lease.item_keys.size(), whole));
    if (last != kNoItems) lease.item_keys.push_back(last);
    while (!lease.item_keys.empty() && lease.item_keys.back() == kNoItems) {
        lease.item_keys.pop_back();
    }
}

// `blocks`, or fewer, so that they do not end inside an item: an encoder makes an item whole.
std::size_t Core::before_cut_item(const Lease& lease, std::size_t blocks) const {
    for (auto item = lease.items.rbegin(); item != lease.items.rend(); ++item) {
        const std::uint64_t end = std::uint64_t{blocks} * config_.block_tokens;
        if (item->start < end && end < item->stop) blocks = item->start / config_.block_tokens;
    }
    return blocks;
}

// Path, device_hit and host_hit: the longest cached prefix that leaves something to compute.
void Core::walk(Lease& lease) {
    const std::size_t limit = hit_limit(lease);
    const std::int32_t* tokens = lease.tokens.data();
    NodeId node = root_of(lease);
    lease.path.resize(limit);
    lease.device_hit = 0;
    std::size_t known = 0;
    for (; known < limit; ++known, tokens += config_.block_tokens) {
        node = tree_.find_child(node, tokens, key_of(lease.item_keys, known));
        if (node == kNone) break;
        lease.path[known] = node;
        lease.device_hit += tree_[node].has(kDeviceValid);
    }
    lease.path.resize(known);
    lease.known_blocks = static_cast<std::uint32_t>(known);
    const std::size_t whole = reachable(lease, lease.path.size());
    while (lease.path.size() > whole) {
        lease.device_hit -= tree_[lease.path.back()].has(kDeviceValid);
        lease.path.pop_back();
    }
    lease.host_hit = static_cast<std::uint32_t>(lease.path.size()) - lease.device_hit;
    lease.version = version_;
}

// Most recently used, deepest least so: a child is always evicted before its parent.
void Core::touch(const std::vector<NodeId>& path) {
    for (std::size_t i = path.size(); i-- > 0;) {
        if (!tree_[path[i]].has(kQueued | kParked)) continue;
        dequeue(path[i]);
        enqueue(path[i]);
    }
}

// The longest run of full blocks behind what is cached that one granted lease will compute. A hit
// may end before that: where its owner has not saved the state yet, or inside an item.
Pending Core::pending(LeaseId id) {
    Lease& lease = lease_at(id);
    if (lease.granted || lease.swapped || promises_.empty()) return {0, 0};
    if (lease.version != version_) walk(lease);
    const std::size_t limit = hit_limit(lease);
    std::size_t first = lease.path.size();
    NodeId end = first == 0 ? root_of(lease) : lease.path.back();
    for (; first < limit; ++first) {
        const NodeId child = tree_.find_child(end, &lease.tokens[first * config_.block_tokens],
                                              key_of(lease.item_keys, first));
        if (child == kNone) break;
        end = child;
    }
    return promises_.find(end, lease, first, limit);
}

// Others may wait for what this lease will publish next.
void Core::announce(Lease& lease) {
    withdraw(lease);
    if (!lease.writes || lease.failed || lease.released || lease.epoch != epoch_) return;
    if (lease.path.size() >= lease.tokens.size() / config_.block_tokens) return;
    lease.frontier = lease.path.empty() ? root_of(lease) : lease.path.back();
    promises_.add(lease);
}

void Core::withdraw(Lease& lease) {
    if (lease.frontier == kNone) return;
    promises_.remove(lease);
    lease.frontier = kNone;
}

}  // namespace aiokv
