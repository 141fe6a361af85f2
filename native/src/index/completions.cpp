#include "aiokv/completions.hpp"

#include <algorithm>

#include "aiokv/error.hpp"

namespace aiokv {
void Completions::complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block) {
    if (external_.has(id)) return finish_external(id, outcome, first_bad_block);
    if (transfers_.is_move(id)) return finish_move(id, outcome, first_bad_block);
    const Transfer transfer = transfers_.end(id);
    const auto nodes = static_cast<std::uint32_t>(transfer.nodes.size());
    const std::uint32_t good = proven(outcome, first_bad_block, transfer.device_blocks.size());
    if (transfer.direction == Direction::kOffload) {
        residency_.finish_offload(transfer, std::min(good, nodes));
        store_saver_.note_host_copies(std::span(transfer.nodes).first(std::min(good, nodes)));
    } else if (outcome == Outcome::kCancelled && transfer.leases.empty()) {
        residency_.cancel_onload(transfer);
    } else {
        if (good < nodes) fail_leases(transfer, transfer.nodes[good]);
        residency_.finish_onload(transfer, std::min(good, nodes));
    }
    finish_tail(transfer, good);
    if (transfer.direction == Direction::kOnload) {
        for (const LeaseId lease : transfer.leases) settle(leases_.at(lease), id);
    }
    index_.change();
}

void Completions::finish_external(TransferId id, Outcome outcome, std::uint32_t first_bad_block) {
    const std::size_t blocks = external_.get(id).device_blocks.size();
    const ExternalEnd end = external_.complete(id, proven(outcome, first_bad_block, blocks),
                                               outcome == Outcome::kCancelled);
    index_.change();
    for (const auto& [sharing, good_blocks] : end.sharing) fail(leases_.at(sharing), good_blocks);
    if (end.lease != 0) {
        Lease& lease = leases_.at(end.lease);
        if (end.failed) fail(lease, end.good_blocks);
        settle(lease, id);
    }
    external_.saves().publish_postponed();
}

void Completions::finish_move(TransferId id, Outcome outcome, std::uint32_t first_bad_block) {
    const Move move = transfers_.end_move(id);
    const std::uint32_t good = proven(outcome, first_bad_block, move.targets.size());
    if (external_.exist()) {
        const bool failed = outcome == Outcome::kFailed;
        for (const LeaseId reader : external_.groups().finish_move(id, move, good, failed)) {
            fail(leases_.at(reader), 0);
        }
        external_.saves().publish_postponed();
    } else {
        auxiliary_.finish_move(move, outcome, good);
    }
    if (move.lease == 0) return;
    Lease& lease = leases_.at(move.lease);
    if (outcome != Outcome::kDone) fail(lease, 0);
    settle(lease, id);
}

// Removes the ended transfer from those that the lease waits for.
void Completions::settle(Lease& lease, TransferId id) {
    std::erase(lease.onloads, id);
    if (lease.onloads.empty()) publication_.settle(lease);
}

// Ends the tail of a transfer. Its first `good_blocks` blocks were copied correctly.
void Completions::finish_tail(const Transfer& transfer, std::uint32_t good_blocks) {
    if (transfer.tail_owner == 0) return;
    const std::size_t nodes = transfer.nodes.size();
    const std::span<const BlockId> host = std::span(transfer.host_blocks).subspan(nodes);
    if (transfer.orphaned) {
        for (std::size_t i = nodes; i < transfer.device_blocks.size(); ++i) {
            device_.give_back(transfer.device_blocks[i]);
        }
        return residency_.free_host(host);
    }
    Lease& lease = leases_.at(transfer.tail_owner);
    if (transfer.direction == Direction::kOffload) {
        return swaps_.finish(lease, good_blocks == transfer.device_blocks.size());
    }
    residency_.free_host(host);
    if (good_blocks == transfer.device_blocks.size() || good_blocks < nodes) return;
    fail(lease, static_cast<std::uint32_t>(lease.path.size() + good_blocks - nodes));
}

// Reduces cached_tokens of every lease that joined the transfer to the end before its first bad
// block.
void Completions::fail_leases(const Transfer& transfer, NodeId first_bad) {
    std::size_t depth = 0;  // index of the node, which is the same in every path
    for (const LeaseId id : transfer.leases) {
        Lease& lease = leases_.at(id);
        if (depth >= lease.path.size() || lease.path[depth] != first_bad) {
            const auto bad = std::find(lease.path.begin(), lease.path.end(), first_bad);
            if (bad == lease.path.end()) continue;
            depth = static_cast<std::size_t>(bad - lease.path.begin());
        }
        fail(lease, static_cast<std::uint32_t>(depth));
    }
}

void Completions::fail(Lease& lease, std::uint32_t good_blocks) {
    // If an item is cut, all its blocks are computed again, because an encoder computes whole
    // items.
    good_blocks = static_cast<std::uint32_t>(matching_.before_cut_item(lease, good_blocks));
    if (auxiliary_.exist()) {  // state and windows belong to later positions, or never arrived
        good_blocks = 0;
        state_.forget_snapshots(lease, 0);
    }
    lease.cached_tokens = std::min(lease.cached_tokens, good_blocks * config_.block_tokens);
    lease.computed_tokens = std::min(lease.computed_tokens, good_blocks * config_.block_tokens);
    promises_.withdraw(lease);
    if (lease.is(LeaseState::kGranted)) {
        leases_.move(lease, LeaseState::kFailed);
    } else if (lease.is(LeaseState::kReleasing)) {
        lease.flags.writes = false;  // it publishes nothing more
    }
}

std::int64_t Completions::recompute_from(Lease& lease) {
    if (!lease.is(LeaseState::kFailed)) return -1;
    if (!lease.onloads.empty()) {
        throw LeaseError("recompute_from: transfers still write blocks of this lease")
            .of(lease.id())
            .hint("await layers.wait_all() first");
    }
    if (auxiliary_.exist()) {
        throw LeaseError(
            "recompute_from: recurrent state and windows cannot go back to the blocks that did "
            "arrive")
            .of(lease.id())
            .hint("preempt the lease, then resume it");
    }
    leases_.move(lease, LeaseState::kGranted);
    lease.covered_tokens = 0;
    return lease.computed_tokens;
}

}  // namespace aiokv
