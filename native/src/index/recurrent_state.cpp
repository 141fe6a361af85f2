#include "aiokv/recurrent_state.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

RecurrentState::RecurrentState(const CoreConfig& config, Index& index, const LeaseTable& leases,
                               TransferLedger& transfers)
    : config_(config), index_(index), leases_(leases), transfers_(transfers) {
    if (config.state_slots == 0) return;
    group_.emplace(config, kRecurrentState, index, transfers, GroupPool(config.state_slots, 1),
                   config.host_state_slots);
}

// If the snapshot of the hit is in the only slot that can be taken, the lease takes that slot over,
// so there is nothing to copy.
void RecurrentState::take(Lease& lease) {
    if (!group_ || lease.recurrent.valid) return;
    GroupPool& pool = group_->pool;
    const GroupPool* host = group_->host_pool();
    const NodeId hit = lease.path.empty() ? kNone : lease.path.back();
    const BlockId source = hit == kNone ? kNoBlock : pool.find(hit);
    const bool is_on_host = host != nullptr && source == kNoBlock && hit != kNone;
    const BlockId host_source = is_on_host ? host->find(hit) : kNoBlock;
    lease.recurrent.hit = {source != kNoBlock, host_source != kNoBlock};
    if (!lease.flags.computes) return keep_snapshot(lease, source, host_source);
    lease.recurrent.valid = true;
    if (hit != kNone) group_->note_hit(hit);
    const bool is_idle = source != kNoBlock && pool.is_idle(source);
    if (lease.recurrent.slot == kNoBlock && is_idle && pool.room() == 1) {
        pool.detach(source);
        lease.recurrent.slot = source;
        index_.change();
        return;
    }
    if (source != kNoBlock) {
        group_->note_use(source);
        pool.add_reader(source);
    }
    if (host_source != kNoBlock) group_->host->pool().add_reader(host_source);
    if (lease.recurrent.slot == kNoBlock) lease.recurrent.slot = group_->take();
    if (host_source != kNoBlock) return start_move(lease, host_source, MoveRoute::kFromHost);
    start_move(lease, source, MoveRoute::kOnDevice);
}

// Keeps the snapshot of a hit where it is, for a lease that computes nothing.
void RecurrentState::keep_snapshot(Lease& lease, BlockId source, BlockId host_source) {
    lease.recurrent.read_snapshot = source;
    lease.recurrent.read_host_snapshot = host_source;
    if (source != kNoBlock) group_->pool.add_reader(source);
    if (host_source != kNoBlock) group_->host->pool().add_reader(host_source);
}

void RecurrentState::fork(const Lease& parent, Lease& child, Step step) {
    if (!group_) return;
    child.recurrent.slot = group_->take();
    child.recurrent.hit = {};
    child.recurrent.valid = true;
    group_->pool.use_in(parent.recurrent.slot, step);
    group_->pool.use_in(child.recurrent.slot, step);
}

void RecurrentState::use_in(const Lease& lease, Step step) {
    if (lease.recurrent.slot != kNoBlock) group_->pool.use_in(lease.recurrent.slot, step);
}

void RecurrentState::start_move(Lease& lease, BlockId source, MoveRoute route) {
    Move move;
    move.lease = lease.id();
    move.sources = {source};
    move.targets = {lease.recurrent.slot};
    move.after_step = group_->pool.after_step(lease.recurrent.slot);
    move.route = route;
    if (route == MoveRoute::kOnDevice && source != kNoBlock) {
        move.after_step = std::max(move.after_step, group_->pool.after_step(source));
    }
    lease.onloads.push_back(transfers_.begin_move(std::move(move)));
}

void RecurrentState::finish_move(const Move& move, Outcome outcome) {
    const bool copied = outcome == Outcome::kDone;
    if (move.route == MoveRoute::kToHost) return group_->host->finish_save(move, copied ? 1 : 0);
    const BlockId source = move.sources[0];
    if (move.route == MoveRoute::kFromHost) {
        group_->host->finish_read(source, outcome == Outcome::kFailed);
    } else if (source != kNoBlock) {
        group_->pool.remove_reader(source);
    }
    if (move.lease == 0) {
        group_->pool.give_back(move.targets[0], 0);
    } else if (copied) {
        const bool is_onload = move.route == MoveRoute::kFromHost;
        group_->onloaded += is_onload;
        group_->cloned += !is_onload && source != kNoBlock;
    }
}

void RecurrentState::orphan_move(Lease& lease, TransferId id, Step step) {
    group_->pool.use_in(transfers_.move(id).targets[0], step);
    lease.recurrent.slot = kNoBlock;
    transfers_.orphan_move(id);
}

StateCopy RecurrentState::snapshot(Lease& lease, std::int64_t num_tokens, Step step) {
    if (!group_) {
        throw UsageError("snapshot: the model has no recurrent state; state_slots is 0")
            .of(lease.id())
            .field("state_slots");
    }
    if (!lease.has_blocks() || lease.is(LeaseState::kSwapping) || !lease.flags.computes) {
        throw LeaseError("snapshot: the lease is " + std::string(name_of(lease.state)) +
                         "; only the state of a granted lease that computes can be saved")
            .of(lease.id());
    }
    if (num_tokens != lease.computed_tokens || num_tokens < 1 ||
        num_tokens % config_.block_tokens != 0) {
        throw LeaseError("snapshot: cannot save the state after " + std::to_string(num_tokens) +
                         " positions: " + str(lease.computed_tokens) +
                         " are committed, and a block has " + str(config_.block_tokens))
            .of(lease.id())
            .hint("commit exactly up to a block boundary, then take the snapshot");
    }
    if (!lease.flags.writes || lease.is(LeaseState::kFailed) || !index_.is_of_epoch(lease)) {
        return {};
    }
    if (lease.computed_tokens > lease.tokens.size()) return {};
    const std::uint32_t block = lease.computed_tokens / config_.block_tokens - 1;
    if (block < lease.path.size()) {
        const NodeId node = lease.path[block];
        group_->touch_hit({&node, 1});
        const BlockId saved = group_->pool.find(node);
        if (saved != kNoBlock || index_.tree()[node].has(kDetached)) return {};
    }
    const auto is_same = [block](const UnattachedSnapshot& other) { return other.block == block; };
    if (std::any_of(lease.recurrent.snapshots.begin(), lease.recurrent.snapshots.end(), is_same))
        return {};
    if (group_->pool.room() == 0) return {};
    const BlockId target = group_->take();
    group_->pool.use_in(lease.recurrent.slot, step);
    group_->pool.use_in(target, step);
    lease.last_step = std::max(lease.last_step, step);
    lease.recurrent.snapshots.push_back({block, target});
    attach_snapshots(lease);
    return {lease.recurrent.slot, target};
}

void RecurrentState::discard_snapshot(Lease& lease, BlockId slot) {
    const auto unattached =
        std::erase_if(lease.recurrent.snapshots,
                      [slot](const UnattachedSnapshot& other) { return other.slot == slot; });
    if (unattached > 0) return group_->pool.give_back(slot, 0);
    group_->pool.forget(group_->pool.node_of(slot));
    index_.change();
}

// The first snapshot of a node is kept.
void RecurrentState::attach_snapshots(Lease& lease) {
    std::erase_if(lease.recurrent.snapshots, [this, &lease](const UnattachedSnapshot& snapshot) {
        if (snapshot.block >= lease.path.size()) return false;
        const NodeId node = lease.path[snapshot.block];
        if (index_.tree()[node].has(kDetached) || group_->pool.find(node) != kNoBlock) {
            group_->pool.give_back(snapshot.slot, 0);
            return true;
        }
        group_->attach(node, snapshot.slot);
        group_->note_use(snapshot.slot);
        index_.change();
        return true;
    });
}

void RecurrentState::forget_snapshots(Lease& lease, Step step) {
    for (const UnattachedSnapshot& snapshot : lease.recurrent.snapshots) {
        group_->pool.give_back(snapshot.slot, step);
    }
    lease.recurrent.snapshots.clear();
}

void RecurrentState::release(Lease& lease, Step step) {
    if (!group_) return;
    forget_snapshots(lease, step);
    if (lease.recurrent.slot != kNoBlock) group_->pool.give_back(lease.recurrent.slot, step);
    if (lease.recurrent.read_snapshot != kNoBlock)
        group_->pool.remove_reader(lease.recurrent.read_snapshot);
    if (lease.recurrent.read_host_snapshot != kNoBlock)
        group_->host->pool().remove_reader(lease.recurrent.read_host_snapshot);
    lease.recurrent.slot = lease.recurrent.read_snapshot = kNoBlock;
    lease.recurrent.read_host_snapshot = kNoBlock;
    lease.recurrent.valid = false;
}

void RecurrentState::check(Report& report) const {
    if (!group_) return;
    Ownership slots = report.pool("state", group_->pool.capacity());
    std::vector<std::uint32_t> readers(group_->pool.capacity(), 0);
    std::vector<std::uint32_t> host_readers(config_.host_state_slots, 0);
    const auto read = [](std::vector<std::uint32_t>& counts, BlockId id) {
        if (id != kNoBlock) ++counts[static_cast<std::size_t>(id)];
    };
    for (const Lease& lease : leases_) {
        const BlockId slot = lease.recurrent.slot;
        const bool has_slot = slot != kNoBlock;
        read(readers, lease.recurrent.read_snapshot);
        read(host_readers, lease.recurrent.read_host_snapshot);
        if (has_slot) slots.own(slot, "a lease");
        for (const UnattachedSnapshot& one : lease.recurrent.snapshots) {
            slots.own(one.slot, "a lease");
        }
        report.require(lease.is_open() || !has_slot, "I5: a free lease has a slot");
        report.require(!lease.has_blocks() || has_slot == lease.flags.computes,
                       "I1: a granted lease has ", has_slot ? "a" : "no", " state slot");
        report.require(!lease.recurrent.valid || has_slot, "I1: a valid state has no slot");
    }
    for (const auto& [id, move] : transfers_.moves()) {
        if (move.group != kRecurrentState) continue;
        if (move.route != MoveRoute::kFromHost) read(readers, move.sources[0]);
        if (move.route == MoveRoute::kToHost) continue;
        const BlockId target = move.targets[0];
        if (move.lease == 0) slots.own(target, "a move");
        report.require(move.lease == 0 || leases_.at(move.lease).recurrent.slot == target,
                       "I3: the target of state move ", id, " changed under way");
    }
    group_->check(report, std::move(slots), std::move(readers), std::move(host_readers));
}

}  // namespace aiokv
