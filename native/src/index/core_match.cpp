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
    const LeaseId id = open_lease(tokens, open_context(context), reads, writes);
    Lease& lease = leases_[static_cast<std::uint32_t>(id)];
    if (!items.empty()) set_items(lease, items);
    walk(lease);
    touch(lease.path);
    if (has_sides()) touch_sides(lease.path);
    return {id, lease.device_hit, lease.host_hit};
}

std::size_t Core::hit_limit(const Lease& lease) const {
    return lease.reads ? border_before(lease.tokens.size()) : 0;
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
    lease.path.clear();
    lease.device_hit = 0;
    for (std::size_t i = 0; i < limit; ++i, tokens += config_.block_tokens) {
        node = tree_.find_child(node, tokens, key_of(lease.item_keys, i));
        if (node == kNone) break;
        lease.path.push_back(node);
        lease.device_hit += tree_[node].has(kDeviceValid);
    }
    lease.known_blocks = static_cast<std::uint32_t>(lease.path.size());
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
    Pending best{0, 0};
    const auto [begin, last] = promises_.equal_range(end);
    for (auto promise = begin; promise != last; ++promise) {
        const Lease& owner = leases_[promise->second];
        const std::size_t stop =
            std::min(limit, owner.tokens.size() / config_.block_tokens) * config_.block_tokens;
        std::size_t same = first * config_.block_tokens;
        while (same < stop && owner.tokens[same] == lease.tokens[same]) ++same;
        std::size_t block = first;
        while (block < same / config_.block_tokens &&
               key_of(owner.item_keys, block) == key_of(lease.item_keys, block)) {
            ++block;
        }
        const auto blocks = static_cast<std::uint32_t>(block - first);
        if (blocks > best.blocks) {
            best = {(std::uint64_t{owner.generation} << 32) | owner.slot, blocks};
        }
    }
    return best;
}

// Others may wait for what this lease will publish next.
void Core::announce(Lease& lease) {
    withdraw(lease);
    if (!lease.writes || lease.failed || lease.released || lease.epoch != epoch_) return;
    if (lease.path.size() >= lease.tokens.size() / config_.block_tokens) return;
    lease.frontier = lease.path.empty() ? root_of(lease) : lease.path.back();
    promises_.emplace(lease.frontier, lease.slot);
}

void Core::withdraw(Lease& lease) {
    if (lease.frontier == kNone) return;
    const auto [begin, last] = promises_.equal_range(lease.frontier);
    for (auto promise = begin; promise != last; ++promise) {
        if (promise->second != lease.slot) continue;
        promises_.erase(promise);
        break;
    }
    lease.frontier = kNone;
}

}  // namespace aiokv
