#include "aiokv/publication.hpp"

#include <algorithm>
#include <string>

#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

void Publication::append(Lease& lease, Tokens tokens, std::span<const Item> items) {
    // The server names external blocks of new positions when it wants to.
    const bool is_unlimited = external_.exist() && lease.has_blocks();
    const auto most = is_unlimited ? static_cast<std::uint32_t>(kMaxTokens) : lease.num_tokens;
    if (lease.tokens.size() + tokens.size() > most) {
        throw LeaseError("append: " + str(tokens.size()) + " tokens at position " +
                         str(lease.tokens.size()) + " exceed the " + str(most) +
                         " allocated positions")
            .of(lease.id())
            .hint(external_.exist() ? "call allocate first" : "call extend first");
    }
    if (!items.empty()) {
        check_items(items, lease.tokens.size(), lease.tokens.size() + tokens.size());
    }
    const std::size_t block_tokens = config_.block_tokens;
    const bool names_more_blocks =
        lease.frontier != kNone &&
        lease.tokens.size() % block_tokens + tokens.size() >= block_tokens;
    if (names_more_blocks) promises_.remove(lease);
    lease.tokens.insert(lease.tokens.end(), tokens.begin(), tokens.end());
    index_.add_items(lease, items);
    if (names_more_blocks) promises_.add(lease);
}

void Publication::check_commit(const Lease& lease, const char* call,
                               std::int64_t num_tokens) const {
    if (!lease.has_blocks()) {
        throw LeaseError(std::string(call) + ": the lease is " + name_of(lease.state) +
                         " and has no blocks")
            .of(lease.id())
            .hint("call allocate first");
    }
    if (lease.is(LeaseState::kSwapping)) {
        throw LeaseError(std::string(call) + ": the lease is being swapped to host memory")
            .of(lease.id());
    }
    if (num_tokens < 0 || num_tokens > lease.num_tokens) {
        throw LeaseError(std::string(call) + ": num_tokens is " + std::to_string(num_tokens) +
                         "; it must be between 0 and the " + str(lease.num_tokens) +
                         " allocated positions")
            .of(lease.id())
            .hint(external_.exist() ? "call assign first" : "call extend first");
    }
    const auto computed = static_cast<std::uint32_t>(num_tokens);
    if (!lease.windows.empty() && computed > windows_.max_extend_tokens(lease)) {
        throw LeaseError(std::string(call) + ": the windows have blocks for " +
                         str(windows_.max_extend_tokens(lease)) + " positions, not for " +
                         std::to_string(num_tokens) + "; a step computes at most step_tokens")
            .of(lease.id())
            .field("windows");
    }
}

std::uint32_t Publication::commit(Lease& lease, std::int64_t num_tokens, Step step) {
    check_commit(lease, "commit", num_tokens);
    const auto computed = static_cast<std::uint32_t>(num_tokens);
    if (lease.is(LeaseState::kFailed) || computed <= lease.computed_tokens) return publish(lease);
    if (step > device_.finished_step()) {
        const std::size_t used = lease.computed_tokens / config_.block_tokens;
        device_.use_in(std::span(lease.table).subspan(used, config_.blocks_for(computed) - used),
                       step);
        windows_.use_computed(lease, computed, step);
        external_.groups().use_computed(lease, config_.blocks_for(computed), step);
    }
    lease.computed_blocks +=
        config_.blocks_for(computed) - config_.blocks_for(lease.computed_tokens);
    computed_tokens_ += computed - lease.computed_tokens;
    computed_prompt_tokens_ += std::min(computed, lease.prompt_tokens) -
                               std::min(lease.computed_tokens, lease.prompt_tokens);
    lease.computed_tokens = computed;
    if (!lease.received.empty()) {
        lease.keep_received(computed, lease.num_tokens);
    }
    lease.last_step = std::max(lease.last_step, step);
    const std::uint32_t published = publish(lease);
    if (!lease.windows.empty()) windows_.advance(lease, step);
    return published;
}

std::uint32_t Publication::commit_received(Lease& lease, std::int64_t num_tokens) {
    check_commit(lease, "commit", num_tokens);
    const auto computed = static_cast<std::uint32_t>(num_tokens);
    if (lease.is(LeaseState::kFailed) || computed <= lease.computed_tokens) return publish(lease);
    if (const std::uint32_t end = lease.end_of_received(); computed > end) {
        throw LeaseError("commit: num_tokens is " + std::to_string(num_tokens) +
                         ", but positions from " + str(end) + " on were not received")
            .of(lease.id());
    }
    lease.computed_tokens = computed;
    lease.keep_received(computed, lease.num_tokens);
    for (WindowTable& window : lease.windows) {
        window.received_tokens = 0;
        window.has_arrived = false;
    }
    const std::uint32_t published = publish(lease);
    if (!lease.windows.empty()) windows_.advance(lease, 0);
    return published;
}

std::uint32_t Publication::publish(Lease& lease) {
    if (external_.exist()) return external_.saves().publish(lease);
    if (!lease.flags.writes || !index_.is_of_epoch(lease) || lease.is(LeaseState::kFailed)) {
        return 0;
    }
    if (!lease.onloads.empty() || lease.is(LeaseState::kSwapping)) return 0;
    const std::size_t known = std::min<std::size_t>(lease.computed_tokens, lease.tokens.size());
    const auto target = static_cast<std::uint32_t>(known / config_.block_tokens);
    const auto first = static_cast<std::uint32_t>(lease.path.size());
    const bool is_attached = index_.attached_blocks(lease) == lease.path.size();
    if (first >= target && is_attached) return 0;
    if (!is_attached) {  // what the lease recomputed after a failed onload can be published
        uses_.forget(lease);
        if (!residency_.reclaim_detached(lease)) return 0;
    }
    PrefixTree& tree = index_.tree();
    const std::size_t old = lease.path.size();
    std::size_t added = old;
    if (old < target) {
        const NodeId above = old == 0 ? index_.root_of(lease) : lease.path.back();
        added += tree.find_or_add_path(above, &lease.tokens[old * config_.block_tokens],
                                       keys_from(lease.item_keys, old), target - old, lease.path);
    }
    // The first proven copy is kept: if a block is indexed already, the lease's copy stays private,
    // unless the index has no copy on the device.
    const std::uint32_t published = residency_.publish(
        lease, old, added,
        [this](NodeId id, const Node& node) { saver_.note_uses(id, node.uses); });
    if (!lease.recurrent.snapshots.empty()) state_.attach_snapshots(lease);
    if (!lease.windows.empty()) windows_.publish(lease, first);
    announce(lease);
    index_.change();
    published_ += published;
    return published;
}

void Publication::settle(Lease& lease) {
    publish(lease);
    if (!lease.windows.empty()) windows_.advance(lease, lease.last_step);
}

void Publication::announce(Lease& lease) {
    if (external_.exist()) return external_.saves().announce(lease);
    promises_.withdraw(lease);
    if (!lease.flags.writes || !index_.is_of_epoch(lease)) return;
    if (lease.is(LeaseState::kFailed) || lease.is(LeaseState::kReleasing)) return;
    if (lease.path.size() >= lease.tokens.size() / config_.block_tokens) return;
    lease.frontier = lease.path.empty() ? index_.root_of(lease) : lease.path.back();
    promises_.add(lease);
}

}  // namespace aiokv
