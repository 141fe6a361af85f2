#include "aiokv/matching.hpp"

#include <algorithm>

#include "core_detail.hpp"

namespace aiokv {

std::size_t Matching::hit_limit(const Lease& lease, std::size_t length) const {
    if (!lease.flags.reads) return 0;
    return lease.flags.whole ? length / config_.block_tokens : boundary_before(length);
}

// Returns the last block boundary at which a prompt of `length` tokens may be hit.
std::size_t Matching::boundary_before(std::size_t length) const {
    if (length < config_.leave_tokens) return 0;
    return (length - config_.leave_tokens) / config_.block_tokens;
}

std::size_t Matching::before_cut_item(const Lease& lease, std::size_t blocks) const {
    if (config_.splits_items) return blocks;
    for (auto item = lease.items.rbegin(); item != lease.items.rend(); ++item) {
        const std::uint64_t end = std::uint64_t{blocks} * config_.block_tokens;
        if (item->start < end && end < item->stop) blocks = item->start / config_.block_tokens;
    }
    return blocks;
}

void Matching::walk(Lease& lease, Tokens prompt) const {
    const PrefixTree& tree = index_.tree();
    const std::size_t limit = hit_limit(lease, prompt.size());
    lease.path.clear();
    const PrefixTree::FoundPath found =
        tree.find_path(index_.root_of(lease), prompt.data(), lease.item_keys, limit, lease.path);
    lease.known_blocks = static_cast<std::uint32_t>(found.blocks);
    lease.path.resize(reachable(lease, found.blocks));
    const bool is_whole = lease.path.size() == found.blocks;
    lease.device_hit = is_whole ? found.on_device : tree.count_on_device(lease.path, kDeviceValid);
    lease.host_hit = static_cast<std::uint32_t>(lease.path.size()) - lease.device_hit;
    lease.version = index_.version();
}

std::size_t Matching::reachable(const Lease& lease, std::size_t blocks) const {
    blocks = before_cut_item(lease, blocks);
    while (blocks > 0 && !auxiliary_.covers(lease.path, blocks)) {
        blocks = before_cut_item(lease, blocks - 1);
    }
    return blocks;
}

std::size_t Matching::onloadable(const Lease& lease, std::size_t blocks) const {
    blocks = reachable(lease, blocks);
    while (blocks > 0 && !auxiliary_.can_onload(lease.path, blocks)) {
        blocks = reachable(lease, blocks - 1);
    }
    return blocks;
}

std::size_t Matching::joinable(const Lease& lease) const {
    if (transfers_.all().empty()) return lease.path.size();
    const auto ends = [this](NodeId node) {
        const Node& n = index_.tree()[node];
        return n.has(kDeviceLoading) && transfers_.is_cancelling(transfers_.onload_of(node));
    };
    return static_cast<std::size_t>(std::find_if(lease.path.begin(), lease.path.end(), ends) -
                                    lease.path.begin());
}

std::size_t Matching::resident_prefix(const Lease& lease, std::size_t first) const {
    const auto is_absent = [this](NodeId node) {
        return !index_.tree()[node].has(kDeviceResident);
    };
    const auto begin = lease.path.begin() + static_cast<std::ptrdiff_t>(first);
    return static_cast<std::size_t>(std::find_if(begin, lease.path.end(), is_absent) -
                                    lease.path.begin());
}

void Matching::shorten(Lease& lease, std::size_t blocks) {
    lease.path.resize(blocks);
    lease.version = 0;
}

void Matching::choose_path(Lease& lease, std::size_t usable) const {
    refresh(lease);
    // A host hit that is too short for an onload is computed again, unless its onload is in flight:
    // then it is joined.
    if (lease.host_hit < config_.min_onload_blocks) shorten(lease, resident_prefix(lease));
    usable = onloadable(lease, std::min({usable, lease.path.size(), joinable(lease)}));
    if (lease.path.size() > usable) shorten(lease, usable);
}

std::size_t Matching::writable_path(const Lease& lease, std::size_t resident,
                                    std::size_t writable) const {
    if (lease.path.size() - resident <= writable) return lease.path.size();
    const std::size_t blocks = onloadable(lease, resident + writable);
    if (blocks <= resident || blocks - resident >= config_.min_onload_blocks) return blocks;
    return onloadable(lease, resident);
}

Matching::Frontier Matching::frontier(Lease& lease) const {
    refresh(lease);
    const PrefixTree& tree = index_.tree();
    const std::size_t limit = hit_limit(lease);
    std::size_t first = lease.path.size();
    NodeId end = first == 0 ? index_.root_of(lease) : lease.path.back();
    for (; first < limit; ++first) {
        const NodeId child = tree.find_child(end, &lease.tokens[first * config_.block_tokens],
                                             key_of(lease.item_keys, first));
        if (child == kNone) break;
        end = child;
    }
    return {end, first, limit};
}

std::vector<NodeId> Matching::nodes(Lease& lease, std::size_t first, std::size_t end) const {
    if (first >= end) return {};
    refresh(lease);
    const std::size_t hit = lease.path.size();
    const auto at = [&](std::size_t block) {
        return lease.path.begin() + static_cast<std::ptrdiff_t>(std::min(block, hit));
    };
    std::vector<NodeId> nodes(at(first), at(end));
    NodeId node = hit == 0 ? index_.root_of(lease) : lease.path.back();
    for (std::size_t block = hit; block < end; ++block) {
        node = index_.tree().find_child(node, &lease.tokens[block * config_.block_tokens],
                                        key_of(lease.item_keys, block));
        if (block >= first) nodes.push_back(node);
    }
    return nodes;
}

Pending Matching::pending(Lease& lease, const Promises& promises) const {
    if (!lease.is(LeaseState::kMatched) || promises.empty()) return {0, 0};
    const Frontier cached = frontier(lease);
    return promises.find(cached.end, lease, cached.first, cached.limit);
}

std::vector<std::uint32_t> Matching::snapshot_points(const Lease& lease) const {
    if (!lease.flags.writes || !lease.flags.computes) return {};
    const std::size_t hit =
        lease.has_blocks() ? lease.cached_tokens / config_.block_tokens : lease.path.size();
    std::vector<std::uint32_t> points;
    for (const std::size_t blocks :
         {std::size_t{lease.known_blocks},
          before_cut_item(lease, boundary_before(lease.prompt_tokens))}) {
        const auto tokens = static_cast<std::uint32_t>(blocks * config_.block_tokens);
        if (blocks > hit && (points.empty() || points.back() < tokens)) points.push_back(tokens);
    }
    return points;
}

}  // namespace aiokv
