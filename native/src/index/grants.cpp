#include "aiokv/grants.hpp"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "residency_forecast.hpp"

namespace aiokv {

void Grants::check_request(const Lease& lease, std::int64_t num_tokens, Reserve reserve) const {
    if (lease.has_blocks()) {
        throw LeaseError("allocate: the lease has its blocks already")
            .of(lease.id())
            .hint(config_.external_device ? "name blocks of further positions with assign"
                                          : "use extend for more positions");
    }
    if (num_tokens < 1 || num_tokens > kMaxTokens) {
        throw LeaseError("num_tokens is " + std::to_string(num_tokens) +
                         "; it must be between 1 and " + std::to_string(kMaxTokens))
            .of(lease.id());
    }
    if (lease.is(LeaseState::kSwapped) && num_tokens < lease.computed_tokens) {
        throw LeaseError("num_tokens is " + std::to_string(num_tokens) +
                         "; the swapped lease has " + str(lease.computed_tokens) +
                         " computed positions")
            .of(lease.id())
            .hint("resume it with at least as many positions");
    }
    const std::uint32_t total = config_.blocks_for(static_cast<std::uint64_t>(num_tokens));
    const std::uint32_t kept = reserve.value_or(config_.reserve_blocks);
    if (std::uint64_t{total} + kept <= device_.capacity()) return;
    if (total <= std::min(lease.grown_blocks, device_.capacity())) return;
    throw RequestTooLarge(std::to_string(num_tokens) + " positions need " + str(total) +
                          " blocks of " + str(config_.block_tokens) + " tokens; device_blocks is " +
                          str(device_.capacity()) + ", of which reserve_blocks keeps " + str(kept))
        .of(lease.id())
        .field("device_blocks")
        .hint("raise CacheConfig.device_blocks, or split the request");
}

// Returns the number of free or evictable blocks that a grant leaves to extend(). A lease that
// extend() has let grow into the reserve is granted again if the rest of the device is unused.
std::uint32_t Grants::reserve_for(std::uint32_t total_blocks, Reserve reserve) const {
    return std::min(reserve.value_or(config_.reserve_blocks), device_.capacity() - total_blocks);
}

// Returns the blocks of the request, or 0 while a transfer of its swapped table is being cancelled,
// because that transfer cannot be joined.
std::uint32_t Grants::choose_path(Lease& lease, std::int64_t num_tokens) {
    if (lease.is(LeaseState::kSwapped)) {
        swaps_.trim(lease);
        if (matching_.joinable(lease) < lease.path.size()) return 0;
    } else {
        matching_.choose_path(lease, static_cast<std::size_t>(num_tokens) / config_.block_tokens);
    }
    return config_.blocks_for(static_cast<std::uint64_t>(num_tokens));
}

Grant Grants::allocate(Lease& lease, std::int64_t num_tokens, Reserve reserve) {
    check_request(lease, num_tokens, reserve);
    const std::uint32_t total = choose_path(lease, num_tokens);
    if (total == 0) return Grant::kNone;
    residency_.serve(lease);
    // Take the refs first, so that making room for the other blocks does not evict the hit.
    const std::uint32_t needed = total - residency_.ref(lease.path);
    if (config_.external_device) {  // the server names device blocks later
        lease.save_failed = false;
        lease.kept_blocks = 0;
        take_blocks(lease, 0);
        return Grant::kReady;
    }
    // Check first, so that a failed attempt takes nothing from swapped leases.
    if (needed + reserve_for(total, reserve) > residency_.device_room() ||
        !swaps_.make_auxiliary_room(lease, total) || !make_room(lease, needed) ||
        !fit_writable(lease, total, total - needed)) {
        residency_.unref(lease.path);
        return Grant::kNone;
    }
    lease.num_tokens = static_cast<std::uint32_t>(num_tokens);
    take_blocks(lease, total);
    return lease.onloads.empty() ? Grant::kReady : Grant::kLoading;
}

Grant Grants::prolong(Lease& lease, Tokens more) {
    const std::size_t size = config_.block_tokens;
    const std::size_t old = lease.path.size();
    if (!lease.has_blocks() || lease.flags.computes || auxiliary_.exist() || !lease.items.empty()) {
        throw LeaseError(
            "prolong: only a granted lease that computes nothing, without items and other "
            "groups of blocks, can be prolonged")
            .of(lease.id());
    }
    const bool is_current = lease.is(LeaseState::kGranted) && index_.is_of_epoch(lease) &&
                            index_.attached_blocks(lease) == old;
    if (!is_current || old == 0 || lease.tokens.size() != old * size) return Grant::kNone;
    // The refs of the lease keep its blocks in the tree, so the match goes on behind them.
    index_.tree().find_path(lease.path.back(), more.data(), {}, more.size() / size, lease.path);
    // A worker may have been asked to cancel an onload of the blocks that the lease has already.
    lease.path.resize(std::max(old, matching_.joinable(lease)));
    const std::size_t behind_resident = matching_.resident_prefix(lease, old);
    // As in Matching::choose_path: what is already being loaded counts as part of the onload.
    if (lease.host_hit + lease.path.size() - behind_resident < config_.min_onload_blocks) {
        lease.path.resize(behind_resident);
    }
    if (lease.path.size() == old) return Grant::kNone;
    const auto total = static_cast<std::uint32_t>(lease.path.size());
    residency_.serve(lease);
    const std::uint32_t resident = residency_.ref(std::span(lease.path).subspan(old));
    const auto needed = static_cast<std::uint32_t>(total - old - resident);
    if (needed + reserve_for(total, {}) > residency_.device_room() || !make_room(lease, needed) ||
        !fit_writable(lease, total, total - needed) || lease.path.size() == old) {
        residency_.unref(std::span(lease.path).subspan(old));
        lease.path.resize(old);
        return Grant::kNone;
    }
    const std::size_t blocks = lease.path.size() - old;
    lease.tokens.insert(lease.tokens.end(), more.begin(),
                        more.begin() + static_cast<std::ptrdiff_t>(blocks * size));
    const auto num_tokens = static_cast<std::uint32_t>(lease.tokens.size());
    lease.prompt_tokens = lease.num_tokens = num_tokens;
    lease.computed_tokens = lease.cached_tokens = num_tokens;
    lease.table.resize(lease.path.size());
    const std::uint32_t device_hit = lease.device_hit;
    const std::uint32_t first = take_resident(lease, static_cast<std::uint32_t>(old));
    device_.take(std::span(lease.table).subspan(first));
    lease.host_hit = static_cast<std::uint32_t>(lease.path.size()) - lease.device_hit;
    residency_.on_grant(lease);
    const std::size_t on_device = lease.device_hit - device_hit;
    hit_device_tokens_ += on_device * size;
    hit_host_tokens_ += (blocks - on_device) * size;
    prompt_tokens_ += blocks * size;
    if (first < lease.path.size()) start_onload(lease, first);
    return lease.onloads.empty() ? Grant::kReady : Grant::kLoading;
}

// Onloads need ids that they may write now. Ids of an open step are not writable: the task that has
// to close the step may wait for the layers of this lease first. Blocks that cannot be onloaded are
// computed again; the onload of a swapped table waits for the step. The path has its refs already,
// and `resident` blocks of it are on the device or being loaded. Returns false when there is not
// enough room now.
bool Grants::fit_writable(Lease& lease, std::uint32_t total_blocks, std::size_t resident) {
    if (lease.is(LeaseState::kSwapped)) return true;
    const std::size_t blocks = matching_.writable_path(lease, resident, device_.writable_blocks());
    if (blocks == lease.path.size()) return true;
    residency_.unref(std::span(lease.path).subspan(blocks));
    Matching::shorten(lease, blocks);  // a later attempt may use the other blocks
    return make_room(lease, total_blocks - static_cast<std::uint32_t>(std::min(blocks, resident)));
}

// Fills the table entries of the leading blocks from `first` on that are on the device or being
// loaded, and counts this use. Returns the number of the block behind them.
std::uint32_t Grants::take_resident(Lease& lease, std::uint32_t first) {
    const PrefixTree& tree = index_.tree();
    std::uint32_t resident = first;
    std::span<const NodeId> rest = std::span(lease.path).subspan(first);
    while (!rest.empty() && tree.run(rest.front()).has(kOnDevice)) {
        const auto part = tree.first_part(rest);
        saver_.count_uses(part.front(), part.size());
        const Node* node = &tree[part.front()];
        for (std::size_t i = 0; i < part.size(); ++i) lease.table[resident++] = node++->device;
        rest = rest.subspan(part.size());
    }
    lease.device_hit = resident - first + (first == 0 ? 0 : lease.device_hit);
    for (const NodeId node : rest) {
        const Node& n = tree[node];
        if (!n.has(kDeviceResident)) break;
        lease.table[resident++] = n.device;
        saver_.count_uses(node, 1);
        lease.device_hit += n.has(kDeviceValid);
        if (n.has(kDeviceValid)) continue;
        const TransferId id = transfers_.onload_of(node);
        if (lease.onloads.empty() || lease.onloads.back() != id) {
            lease.onloads.push_back(id);
            transfers_.join(id, lease.id());
        }
    }
    return resident;
}

// Requires that the lease has refs on its path, and that the pool has enough ids.
void Grants::take_blocks(Lease& lease, std::uint32_t total_blocks) {
    const bool resumes = lease.is(LeaseState::kSwapped);
    const auto hits = static_cast<std::uint32_t>(lease.path.size());
    lease.table.resize(total_blocks);
    const std::uint32_t resident = take_resident(lease, 0);
    store_saver_.note_uses(lease, resident);
    fetches_.note_hits(lease);
    device_.take(std::span(lease.table).subspan(resident));
    lease.host_hit = hits - lease.device_hit;
    if (!resumes) lease.computed_tokens = hits * config_.block_tokens;
    lease.cached_tokens = lease.computed_tokens;
    lease.covered_tokens = 0;
    lease.epoch = index_.epoch();
    leases_.move(lease, LeaseState::kGranted);
    residency_.on_grant(lease);
    if (!resumes && lease.flags.computes) misses_.explain(lease, matching_.hit_limit(lease));
    uses_.note(lease);
    hit_device_tokens_ += std::uint64_t{lease.device_hit} * config_.block_tokens;
    hit_host_tokens_ += std::uint64_t{lease.host_hit} * config_.block_tokens;
    prompt_tokens_ += lease.tokens.size();
    ++grants_;
    const bool has_host_blocks = resident < hits || !lease.tail_host.empty();
    if (has_host_blocks && !config_.external_device) start_onload(lease, resident);
    auxiliary_.take(lease);
    if (resumes) residency_.unhold(lease.path);
    publication_.announce(lease);
}

void Grants::start_onload(Lease& lease, std::uint32_t first_host_block) {
    const PrefixTree& tree = index_.tree();
    const std::size_t blocks = lease.path.size() - first_host_block;
    Transfer transfer;
    transfer.leases.push_back(lease.id());
    transfer.nodes.reserve(blocks);
    transfer.device_blocks.reserve(blocks + lease.tail_host.size());
    transfer.host_blocks.reserve(blocks + lease.tail_host.size());
    for (std::size_t i = first_host_block; i < lease.path.size(); ++i) {
        transfer.nodes.push_back(lease.path[i]);
        transfer.device_blocks.push_back(lease.table[i]);
        transfer.host_blocks.push_back(tree[lease.path[i]].host);
    }
    if (!lease.tail_host.empty()) {
        transfer.tail_owner = lease.id();
        for (std::size_t i = 0; i < lease.tail_host.size(); ++i) {
            transfer.device_blocks.push_back(lease.table[lease.path.size() + i]);
            transfer.host_blocks.push_back(lease.tail_host[i]);
        }
        lease.tail_host.clear();
    }
    transfer.after_step = residency_.after_step(transfer.device_blocks);
    const TransferId id = transfers_.begin(std::move(transfer));
    residency_.begin_onload(transfers_.get(id));
    lease.onloads.push_back(id);
}

bool Grants::can_allocate(Lease& lease, std::int64_t num_tokens, bool saves, Reserve reserve) {
    check_request(lease, num_tokens, reserve);
    const std::uint32_t total = choose_path(lease, num_tokens);
    if (total == 0) return false;
    if (config_.external_device) return true;
    const PrefixTree& tree = index_.tree();
    const std::uint32_t needed = total - tree.count_on_device(lease.path, kDeviceResident);
    bool frees_host = false;
    std::vector<NodeId> unheld;
    if (!swaps_.could_make_auxiliary_room(lease, total, frees_host, unheld)) return false;
    Residency::Forecast forecast(residency_, lease.path, residency_.share_of(lease), frees_host,
                                 std::move(unheld));
    const std::uint32_t room = residency_.device_room() - forecast.evictable_path();
    if (needed + reserve_for(total, reserve) > room) return false;
    const bool has_room = will_have_room(forecast, needed, total, saves);
    if (!has_room || lease.is(LeaseState::kSwapped)) return has_room;
    const std::size_t resident = total - needed;
    const std::size_t blocks = matching_.writable_path(lease, resident, forecast.writable_blocks());
    if (blocks >= resident) return true;
    forecast.shorten_path(blocks);
    return forecast.can_make_room(total - static_cast<std::uint32_t>(blocks));
}

// Forecasts an attempt, Saver::take_write_backs() after it, and further attempts. The latter may
// drop unsaved blocks while the host has no room to save them.
bool Grants::will_have_room(Residency::Forecast& forecast, std::uint32_t needed_blocks,
                            std::uint32_t wanted_blocks, bool saves) const {
    bool has_room = forecast.can_make_room(needed_blocks);
    while (saves && !has_room && forecast.may_drop_unsaved(wanted_blocks)) {
        const std::uint32_t before = forecast.free_blocks();
        has_room = forecast.can_make_room(needed_blocks);
        if (transfers_.is_saving()) break;
        if (forecast.free_blocks() > before) continue;
        if (wanted_blocks >= device_.capacity()) break;
        wanted_blocks = std::min(2 * wanted_blocks, device_.capacity());
    }
    return has_room;
}

// Returns the number of blocks that count as evictable but stay until transfers in flight have
// ended: blocks that a transfer reads or writes, and the blocks above them.
std::uint32_t Grants::pinned_blocks() const {
    const PrefixTree& tree = index_.tree();
    std::unordered_set<NodeId> seen;
    std::uint32_t blocks = 0;
    for (const auto& [id, transfer] : transfers_.all()) {
        for (NodeId node : transfer.nodes) {
            while (!tree[node].has(kRoot | kDetached) && tree[node].has(kDeviceResident) &&
                   tree.refs(node) == 0 && seen.insert(node).second) {
                blocks += tree[node].has(kDeviceValid);
                node = tree.parent(node);
            }
        }
    }
    return blocks;
}

std::uint32_t Grants::takeable_blocks(std::uint32_t limit, bool saves, std::string_view salt,
                                      Residency::Unsaved unsaved) {
    const bool is_possible = limit <= residency_.device_room();
    limit = std::min(limit, residency_.device_room());
    if (limit <= device_.free_blocks()) return limit;
    if (unsaved == Residency::Unsaved::kDropped || config_.write_policy == SavePolicy::kNone) {
        return std::min(limit, residency_.device_room() - pinned_blocks());
    }
    const std::uint32_t share = index_.share_of_salt(salt);
    Residency::Forecast forecast(residency_, {}, share);
    if (forecast.can_make_room(limit)) return limit;
    const std::uint32_t at_once = forecast.free_blocks();
    const auto can_take = [&](std::uint32_t blocks) {
        Residency::Forecast attempt(residency_, {}, share);
        return will_have_room(attempt, blocks, blocks, saves);
    };
    // To take more, unsaved blocks must be dropped, which happens only if the host has no room at
    // all. It may have room when fewer blocks are taken, because the host copies of evicted blocks
    // are not reclaimed. So try the whole limit first, and then search.
    if (!saves) return at_once;
    if (is_possible && can_take(limit)) return limit;
    if (!can_take(at_once + 1)) return at_once;
    std::uint32_t taken = at_once + 1;
    for (std::uint32_t beyond = limit + 1; beyond - taken > 1;) {
        const std::uint32_t middle = taken + (beyond - taken) / 2;
        (can_take(middle) ? taken : beyond) = middle;
    }
    return taken;
}

bool Grants::extend(std::span<const LeaseId> ids, std::int64_t num_tokens) {
    if (num_tokens < 0 || num_tokens > kMaxTokens) {
        throw LeaseError("extend: num_tokens is " + std::to_string(num_tokens) +
                         "; it must be between 0 and " + std::to_string(kMaxTokens));
    }
    std::vector<Growth> growths;
    growths.reserve(ids.size());
    for (const LeaseId id : ids) {
        Lease& lease = leases_.at(id);
        check_grow(lease, "extend", static_cast<std::uint64_t>(num_tokens));
        growths.push_back({&lease, lease.num_tokens + static_cast<std::uint32_t>(num_tokens)});
    }
    leases_.require_distinct(ids, "extend");
    return grow(growths);
}

void Grants::check_grow(const Lease& lease, const char* call, std::uint64_t more) const {
    if (!lease.has_blocks() || lease.is(LeaseState::kSwapping)) {
        throw LeaseError(std::string(call) + ": the lease is " + name_of(lease.state) +
                         "; only a lease that is allocated, and stays so, can grow")
            .of(lease.id());
    }
    if (lease.num_tokens + more > kMaxTokens) {
        throw LeaseError(std::string(call) + ": " + str(lease.num_tokens) + " + " + str(more) +
                         " positions exceed " + std::to_string(kMaxTokens))
            .of(lease.id());
    }
}

bool Grants::grow(std::span<const Growth> growths) {
    std::uint64_t needed = 0;
    for (const auto& [lease, num_tokens] : growths) {
        needed += config_.blocks_for(num_tokens) - lease->table.size();
    }
    if (!windows_.can_grow(growths)) return false;
    if (needed > residency_.device_room()) return false;
    if (!growths.empty()) residency_.serve(*growths.front().lease);
    if (!residency_.make_room(static_cast<std::uint32_t>(needed), unsaved_of_running())) {
        return false;
    }
    for (const auto& [lease, num_tokens] : growths) {
        const std::size_t old = lease->table.size();
        lease->num_tokens = num_tokens;
        lease->table.resize(config_.blocks_for(num_tokens));
        lease->grown_blocks =
            std::max(lease->grown_blocks, static_cast<std::uint32_t>(lease->table.size()));
        device_.take(std::span(lease->table).subspan(old));
        windows_.fit(*lease, 0);
    }
    return true;
}

Fork Grants::fork(Lease& parent, Step step) {
    if (!parent.is(LeaseState::kGranted) || !parent.onloads.empty()) {
        throw LeaseError("fork: only a granted lease whose transfers have ended can be forked")
            .of(parent.id())
            .hint("await layers.wait_all() first");
    }
    if (windows_.exist()) {
        throw UsageError("fork: a lease with sliding windows cannot be forked")
            .of(parent.id())
            .field("windows");
    }
    leases_.require_room();
    std::uint32_t needed = 0;
    for (std::size_t i = 0; i < parent.table.size(); ++i) needed += !index_.is_indexed(parent, i);
    if (!state_.can_fork(parent)) return {};
    residency_.serve(parent);
    if (needed > residency_.device_room() || !residency_.make_room(needed, unsaved_of_running())) {
        return {};
    }

    index_.enter_context(parent.context);
    Lease& child = leases_.open(parent.tokens, parent.context,
                                {parent.flags.reads, parent.flags.writes, true, false});
    Fork fork{child.id(), {}, {}};
    child.path = parent.path;
    index_.copy_items(parent, child);
    residency_.ref(child.path);
    child.table.resize(parent.table.size());
    for (std::size_t i = 0; i < child.table.size(); ++i) {
        if (index_.is_indexed(parent, i)) {
            child.table[i] = index_.tree()[parent.path[i]].device;
            continue;
        }
        device_.take(std::span(child.table).subspan(i, 1));
        if (i >= config_.blocks_for(parent.computed_tokens)) continue;
        fork.source_blocks.push_back(parent.table[i]);
        fork.target_blocks.push_back(child.table[i]);
        device_.use_in(parent.table[i], step);
        device_.use_in(child.table[i], step);
    }
    child.num_tokens = parent.num_tokens;
    child.computed_tokens = child.cached_tokens = parent.computed_tokens;
    child.prompt_tokens = parent.prompt_tokens;
    child.device_hit = config_.blocks_for(parent.computed_tokens);
    child.epoch = parent.epoch;
    parent.last_step = std::max(parent.last_step, step);
    child.last_step = step;
    child.grown_blocks = parent.grown_blocks;
    leases_.move(child, LeaseState::kGranted);
    state_.fork(parent, child, step);
    return fork;
}

void Grants::add_to(CoreStatistics& statistics) const {
    statistics.grants = grants_;
    statistics.prompt_tokens = prompt_tokens_;
    statistics.hit_device_tokens = hit_device_tokens_;
    statistics.hit_host_tokens = hit_host_tokens_;
}

}  // namespace aiokv
