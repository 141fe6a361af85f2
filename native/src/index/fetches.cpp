#include "aiokv/fetches.hpp"

#include <algorithm>
#include <utility>

#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

bool Fetches::may_fetch(const Lease& lease) const {
    return stored_.exist() && lease.is(LeaseState::kMatched) && lease.flags.reads;
}

// Returns the digests of the first blocks that no tier has. They are computed once, because several
// calls need them before the lease is granted, and its tokens do not change until then.
std::span<const Digest> Fetches::digests_of(Lease& lease, const Matching::Frontier& cached,
                                            std::size_t end) {
    std::vector<Digest>& digests = lease.digests;
    if (cached.first < lease.first_digest || cached.first > lease.first_digest + digests.size()) {
        digests.clear();
    }
    if (digests.empty()) lease.first_digest = static_cast<std::uint32_t>(cached.first);
    const std::size_t size = config_.block_tokens;
    end = std::max(std::min(cached.limit, end), cached.first);
    for (std::size_t block = lease.first_digest + digests.size(); block < end; ++block) {
        const Digest parent = digests.empty() ? stored_.digest(cached.end) : digests.back();
        digests.push_back(stored_.digest_below(parent,
                                               Tokens(lease.tokens).subspan(block * size, size),
                                               key_of(lease.item_keys, block)));
    }
    return std::span(digests).subspan(cached.first - lease.first_digest, end - cached.first);
}

Missing Fetches::missing(Lease& lease, std::size_t blocks) {
    if (!may_fetch(lease)) return {lease.path.size(), {}};
    const Matching::Frontier cached = matching_.frontier(lease);
    return {cached.first, digests_of(lease, cached, cached.first + std::min(blocks, most()))};
}

Boundaries Fetches::boundaries(Lease& lease, std::size_t skip) {
    Boundaries found;
    if (!may_fetch(lease)) return found;
    const Matching::Frontier cached = matching_.frontier(lease);
    found.hit = lease.path.size();
    found.cached = cached.first;
    found.first_block = std::min(found.hit + skip, cached.limit);
    const std::size_t end = std::min(cached.limit, found.first_block + most());
    const std::size_t end_cached = std::clamp(cached.first, found.first_block, end);
    for (const NodeId node : matching_.nodes(lease, found.first_block, end_cached)) {
        found.digests.push_back(stored_.digest(node));
    }
    if (end > end_cached) {
        const std::span<const Digest> behind = digests_of(lease, cached, end);
        const auto first = static_cast<std::ptrdiff_t>(end_cached - cached.first);
        found.digests.insert(found.digests.end(), behind.begin() + first, behind.end());
    }
    for (std::size_t block = found.first_block; block < end; ++block) {
        found.may_end.push_back(matching_.before_cut_item(lease, block + 1) == block + 1);
    }
    return found;
}

TransferId Fetches::begin(Lease& lease, std::size_t blocks, TransferId replaced) {
    if (!may_fetch(lease) || blocks == 0) return 0;
    const Matching::Frontier cached = matching_.frontier(lease);
    const std::span<const Digest> digests = digests_of(lease, cached, cached.first + most());
    Fetch fetch;
    for (const Digest& digest : digests.first(std::min(blocks, digests.size()))) {
        const auto found = by_block_.find(digest);
        if (found != by_block_.end() && found->second != replaced) {
            if (fetch.digests.empty()) return found->second;
            break;  // the other fetch brings the rest
        }
        fetch.digests.push_back(digest);
    }
    if (fetch.digests.empty()) return 0;
    fetch.above = cached.end;
    const bool is_root = index_.tree()[fetch.above].has(kRoot);
    residency_.touch(lease.path);
    if (!is_root) residency_.hold({&fetch.above, 1});
    fetch.host_blocks = residency_.take_fetch_room(fetch.digests.size());
    blocks = fetch.host_blocks.size();
    if (blocks == 0) {
        if (!is_root) residency_.unhold({&fetch.above, 1});
        return 0;
    }
    fetch.digests.resize(blocks);
    const auto begin =
        lease.tokens.begin() + static_cast<std::ptrdiff_t>(cached.first * config_.block_tokens);
    fetch.tokens.assign(begin, begin + static_cast<std::ptrdiff_t>(blocks * config_.block_tokens));
    for (std::size_t i = 0; i < blocks; ++i) {
        fetch.item_keys.push_back(key_of(lease.item_keys, cached.first + i));
        if (fetch.item_keys.back() != kNoItems) index_.tree().item_keys().ref(fetch.item_keys[i]);
    }
    fetch.context = lease.context;
    fetch.epoch = index_.epoch();
    index_.begin_growth(fetch.context);
    const TransferId id = transfers_.begin_other();
    for (const Digest& digest : fetch.digests) {
        const auto [found, is_new] = by_block_.insert_or_assign(digest, id);
        if (!is_new) fetches_.at(replaced).is_replaced = true;
    }
    fetches_.emplace(id, std::move(fetch));
    ++begun_;
    return id;
}

void Fetches::purge(const std::vector<bool>& contexts) {
    for (auto& [id, fetch] : fetches_) {
        if (contexts[fetch.context]) fetch.epoch = 0;
    }
}

void Fetches::complete(TransferId id, Outcome outcome, std::uint32_t first_bad) {
    const Fetch fetch = std::move(fetches_.extract(id).mapped());
    const auto blocks = static_cast<std::uint32_t>(fetch.host_blocks.size());
    std::uint32_t good_blocks = proven(outcome, first_bad, blocks);
    fetched_ += good_blocks;
    unfetched_ += blocks - good_blocks;
    const PrefixTree& tree = index_.tree();
    const bool connects = fetch.epoch == index_.epoch() && !tree[fetch.above].has(kDetached);
    if (!connects) good_blocks = 0;
    insert(fetch, good_blocks);
    residency_.free_host(std::span(fetch.host_blocks).subspan(good_blocks));
    if (!tree[fetch.above].has(kRoot)) residency_.unhold({&fetch.above, 1});
    for (const Digest& digest : fetch.digests) {
        const auto found = by_block_.find(digest);
        if (found != by_block_.end() && found->second == id) by_block_.erase(found);
    }
    for (const ItemKey key : fetch.item_keys) {
        if (key != kNoItems) index_.tree().item_keys().unref(key);
    }
    index_.end_growth(fetch.context);
    transfers_.end_other();
}

// Inserts the proven blocks. The first proven copy is kept: a block that has a host copy by now
// does not take another.
void Fetches::insert(const Fetch& fetch, std::uint32_t good_blocks) {
    if (good_blocks == 0) return;
    std::vector<NodeId> nodes;
    const std::size_t known = index_.tree().find_or_add_path(fetch.above, fetch.tokens.data(),
                                                             fetch.item_keys, good_blocks, nodes);
    const auto added = std::span(nodes).subspan(known);
    residency_.inherit_class(added);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        if (!residency_.give_host_copy(nodes[i], fetch.host_blocks[i])) {
            residency_.free_host({&fetch.host_blocks[i], 1});
        }
        stored_.set_digest(nodes[i], fetch.digests[i]);
        residency_.set_store_flags(nodes[i], kStored);
    }
    for (const NodeId node : added) stored_.set(node, kFetched);
    residency_.enqueue_fetched(added);
    index_.change();
}

void Fetches::note_hits(Lease& lease) {
    lease.store_hit = 0;
    if (!lease.digests.empty()) std::vector<Digest>().swap(lease.digests);
    if (!stored_.exist() || !lease.flags.computes) return;
    for (const NodeId node : lease.path) {
        if (!stored_.has(node, kFetched)) continue;
        stored_.clear(node, kFetched);
        ++lease.store_hit;
    }
    hit_blocks_ += lease.store_hit;
}

void Fetches::add_to(CoreStatistics& statistics) const {
    statistics.fetches = begun_;
    statistics.attention.fetched_blocks = fetched_;
    statistics.attention.unfetched_blocks = unfetched_;
    statistics.hit_store_tokens = hit_blocks_ * config_.block_tokens;
    for (const auto& [id, fetch] : fetches_) {
        statistics.attention.host.in_flight += static_cast<std::uint32_t>(fetch.host_blocks.size());
    }
}

void Fetches::check(Report& report) const {
    const PrefixTree& tree = index_.tree();
    std::size_t joinable = 0;
    for (const auto& [id, fetch] : fetches_) {
        ++report.growths[fetch.context];
        for (const BlockId host : fetch.host_blocks) report.host.own(host, "a fetch");
        for (const Digest& digest : fetch.digests) {
            const auto found = by_block_.find(digest);
            const bool is_joined = found != by_block_.end() && found->second == id;
            joinable += is_joined;
            report.require(is_joined || fetch.is_replaced, "I3: fetch ", id,
                           " cannot be joined by the digest of a block");
        }
        for (const ItemKey key : fetch.item_keys) report.item_refs += key != kNoItems;
        if (tree[fetch.above].has(kRoot)) continue;
        report.require(tree.is_live(fetch.above), "I3: fetch ", id, " continues a freed node");
        ++report.holds[fetch.above];
    }
    report.require(joinable == by_block_.size(), "I3: fetches bring ", joinable,
                   " blocks that can be joined, ", by_block_.size(), " are listed");
}

}  // namespace aiokv
