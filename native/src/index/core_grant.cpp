// Granting blocks: allocate, extend.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

// A host hit that is not worth its transfer is computed again; one under way is joined.
void Core::drop_small_onload(Lease& lease) {
    std::size_t resident = 0;
    while (resident < lease.path.size() && tree_[lease.path[resident]].has(kDeviceResident)) {
        ++resident;
    }
    lease.path.resize(resident);
    lease.version = 0;
}

// The path that a grant will take: no more than `usable` blocks, and no onload not worth it.
void Core::choose_path(Lease& lease, std::size_t usable) {
    if (lease.version != version_) walk(lease);
    if (lease.host_hit < config_.min_onload_blocks) drop_small_onload(lease);
    usable = reachable(lease, std::min({usable, lease.path.size(), joinable(lease)}));
    if (lease.path.size() <= usable) return;
    lease.path.resize(usable);
    lease.version = 0;  // a later try may want the rest
}

// Blocks of the path before the first one whose transfer is being cancelled.
std::size_t Core::joinable(const Lease& lease) const {
    const auto ends = [this](NodeId node) {
        const Node& n = tree_[node];
        return n.has(kDeviceLoading) && transfers_.at(n.next).cancelling;
    };
    return static_cast<std::size_t>(std::find_if(lease.path.begin(), lease.path.end(), ends) -
                                    lease.path.begin());
}

// Blocks of the path that can be granted with `writable` ids for onloads.
std::size_t Core::writable_path(const Lease& lease, std::size_t resident,
                                std::size_t writable) const {
    if (lease.path.size() - resident <= writable) return lease.path.size();
    const std::size_t blocks = reachable(lease, resident + writable);
    if (blocks <= resident || blocks - resident >= config_.min_onload_blocks) return blocks;
    return reachable(lease, resident);
}

// Onloads need ids that they may write now. Ids of an open step are not writable: the task that has
// to close the step may wait for the layers of this lease first. Blocks that cannot be onloaded are
// computed again; the onload of a swapped table waits for the step. The path has its refs already.
// Returns false when there is not enough room now.
bool Core::fit_writable(Lease& lease, std::uint32_t total_blocks) {
    if (lease.swapped) return true;
    std::size_t resident = 0;
    for (const NodeId node : lease.path) resident += tree_[node].has(kDeviceResident);
    const std::size_t blocks = writable_path(lease, resident, device_.writable_blocks());
    if (blocks == lease.path.size()) return true;
    for (std::size_t i = lease.path.size(); i-- > blocks;) unref(lease.path[i]);
    lease.path.resize(blocks);
    lease.version = 0;  // a later try may want the rest
    return make_room(total_blocks - static_cast<std::uint32_t>(std::min(blocks, resident)));
}

void Core::check_request(LeaseId id, std::int64_t num_tokens) const {
    const Lease& lease = this->lease(id);
    if (lease.granted) throw LeaseError("the lease has its blocks already; use extend");
    if (num_tokens < 1 || num_tokens > kMaxTokens) {
        throw LeaseError("num_tokens is " + std::to_string(num_tokens) +
                         "; it must be between 1 and " + std::to_string(kMaxTokens));
    }
    if (lease.swapped && num_tokens < lease.computed_tokens) {
        throw LeaseError("the swapped lease has " + str(lease.computed_tokens) +
                         " computed positions; cannot resume it with " +
                         std::to_string(num_tokens));
    }
    const std::uint32_t total = blocks_for(static_cast<std::uint64_t>(num_tokens));
    if (std::uint64_t{total} + config_.reserve_blocks <= device_.capacity()) return;
    if (total <= std::min(lease.grown_blocks, device_.capacity())) return;
    throw RequestTooLarge(std::to_string(num_tokens) + " positions need " + str(total) +
                          " blocks of " + str(config_.block_tokens) + " tokens; device_blocks is " +
                          str(device_.capacity()) + ", of which reserve_blocks keeps " +
                          str(config_.reserve_blocks));
}

// Free or evictable blocks that a grant leaves to extend(). A lease that extend() has let grow into
// the reserve is granted when the rest of the device is unused.
std::uint32_t Core::reserve_for(std::uint32_t total_blocks) const {
    return std::min(config_.reserve_blocks, device_.capacity() - total_blocks);
}

// kNone, holding nothing, when there is not enough room now.
Grant Core::allocate(LeaseId id, std::int64_t num_tokens) {
    check_request(id, num_tokens);
    Lease& lease = lease_at(id);
    const std::uint32_t total = blocks_for(static_cast<std::uint64_t>(num_tokens));
    if (lease.swapped) {
        trim_swapped(lease);
        if (joinable(lease) < lease.path.size()) return Grant::kNone;
    } else {
        choose_path(lease, static_cast<std::size_t>(num_tokens) / config_.block_tokens);
    }

    // Refs first: what the lease hits must not be evicted to make room for the rest of it.
    std::uint32_t resident = 0;
    for (const NodeId node : lease.path) {
        Node& n = tree_[node];
        resident += n.has(kDeviceResident);
        if (n.refs++ == 0) dequeue(node);
    }
    const std::uint32_t needed = total - resident;
    // An attempt in vain takes nothing from swapped leases.
    if (needed + reserve_for(total) > device_.free_blocks() + evictable() ||
        !make_side_room(lease, total) || !make_room(needed) || !fit_writable(lease, total)) {
        for (std::size_t i = lease.path.size(); i-- > 0;) unref(lease.path[i]);
        return Grant::kNone;
    }
    lease.num_tokens = static_cast<std::uint32_t>(num_tokens);
    take_blocks(id, lease, total);
    return lease.onloads.empty() ? Grant::kReady : Grant::kLoading;
}

// The model sees a prompt once, when it is granted.
void Core::classify(Lease& lease) {
    if (!reuse_) return;
    if (lease.classes.empty()) {
        reuse_->observe(lease.tokens, contexts_[lease.context].seed, lease.classes);
        device_duel_->observe(lease.classes);
        if (device_queue_.choose(device_duel_->prefers_score())) forget_ahead();
        if (host_duel_) {
            host_duel_->observe(lease.classes);
            host_queue_.choose(host_duel_->prefers_score());
        }
    }
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        tree_[lease.path[i]].reuse_class = reuse_->class_at(lease.classes, i);
    }
}

// Path nodes hold the lease's refs already, and the pool has the ids.
void Core::take_blocks(LeaseId id, Lease& lease, std::uint32_t total_blocks) {
    const auto hits = static_cast<std::uint32_t>(lease.path.size());
    std::uint32_t resident = 0;
    lease.table.resize(total_blocks);
    lease.device_hit = 0;
    for (; resident < hits && tree_[lease.path[resident]].has(kDeviceResident); ++resident) {
        const Node& node = tree_[lease.path[resident]];
        count_use(lease.path[resident]);
        lease.table[resident] = node.device;
        lease.device_hit += node.has(kDeviceValid);
        if (node.has(kDeviceValid)) continue;
        if (lease.onloads.empty() || lease.onloads.back() != node.next) {
            lease.onloads.push_back(node.next);
            transfers_.at(node.next).leases.push_back(id);
        }
    }
    device_.take(std::span(lease.table).subspan(resident));
    lease.host_hit = hits - lease.device_hit;
    if (!lease.swapped) lease.computed_tokens = hits * config_.block_tokens;
    lease.cached_tokens = lease.computed_tokens;
    lease.epoch = epoch_;
    set_granted(lease, true);
    classify(lease);
    note_use(lease);
    counters_.hit_device_tokens += std::uint64_t{lease.device_hit} * config_.block_tokens;
    counters_.hit_host_tokens += std::uint64_t{lease.host_hit} * config_.block_tokens;
    counters_.prompt_tokens += lease.tokens.size();
    ++counters_.grants;
    if (resident < hits || !lease.tail_host.empty()) start_onload(id, lease, resident);
    take_state(id, lease);
    take_windows(lease);
    if (lease.swapped) {
        lease.swapped = false;
        --swapped_leases_;
        for (const NodeId node : lease.path) unhold(node);
    }
    announce(lease);
}

// All leases get `num_tokens` more positions, or none does.
bool Core::extend(std::span<const LeaseId> ids, std::int64_t num_tokens) {
    if (num_tokens < 0 || num_tokens > kMaxTokens) {
        throw LeaseError("cannot extend by " + std::to_string(num_tokens) + " positions");
    }
    const auto more = static_cast<std::uint64_t>(num_tokens);
    std::uint64_t needed = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const Lease& lease = this->lease(ids[i]);
        if (!lease.granted || lease.swap_out != 0) {
            throw LeaseError("cannot extend a lease that is not allocated, or is being swapped");
        }
        if (lease.num_tokens + more > kMaxTokens) throw LeaseError("the lease grows too long");
        needed += blocks_for(lease.num_tokens + more) - lease.table.size();
    }
    std::vector<LeaseId> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
        throw LeaseError("a lease stands twice in one extend");
    }
    if (!can_extend_windows(ids, more)) return false;
    if (needed > device_.free_blocks() + evictable()) return false;
    if (!make_room(static_cast<std::uint32_t>(needed))) return false;
    for (const LeaseId id : ids) {
        Lease& lease = lease_at(id);
        const std::size_t old = lease.table.size();
        lease.num_tokens += static_cast<std::uint32_t>(more);
        lease.table.resize(blocks_for(lease.num_tokens));
        lease.grown_blocks =
            std::max(lease.grown_blocks, static_cast<std::uint32_t>(lease.table.size()));
        device_.take(std::span(lease.table).subspan(old));
        fit_windows(lease, 0);
    }
    return true;
}

}  // namespace aiokv
