#include "aiokv/recurrent_state.hpp"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

RecurrentState::RecurrentState(const CoreConfig& config, Index& index, const LeaseTable& leases,
                               TransferLedger& transfers)
    : config_(config), index_(index), leases_(leases), transfers_(transfers) {
    if (config.state_slots > 0) pool_.emplace(config.state_slots, 1);
    if (!pool_ || config.host_state_slots == 0) return;
    host_.emplace(config, index, *pool_, transfers, config.host_state_slots);
}

void RecurrentState::touch(NodeId node) {
    pool_->touch_hit({&node, 1});
    if (host_) host_->touch_hit({&node, 1});
}

BlockId RecurrentState::take_slot() {
    BlockId slot = kNoBlock;
    if (pool_->take(slot)) {
        ++evicted_snapshots_;
        index_.change();
    }
    if (host_) host_->note_taken();
    return slot;
}

// Where the snapshot that the lease hits has the only slot to be had, the lease takes that over:
// there is nothing to copy then.
void RecurrentState::take(Lease& lease) {
    if (!pool_ || lease.recurrent.valid) return;
    const BlockId source = lease.path.empty() ? kNoBlock : pool_->find(lease.path.back());
    const bool is_on_host = host_ && source == kNoBlock && !lease.path.empty();
    const BlockId host_source = is_on_host ? host_->find(lease.path.back()) : kNoBlock;
    if (!lease.flags.computes) return keep_snapshot(lease, source, host_source);
    lease.recurrent.valid = true;
    if (host_ && !lease.path.empty()) host_->note_hit(lease.path.back());
    const std::uint32_t idle_source = source != kNoBlock && pool_->is_idle(source);
    if (lease.recurrent.slot == kNoBlock && idle_source > 0 && pool_->room() == 1) {
        pool_->detach(source);
        lease.recurrent.slot = source;
        index_.change();
        return;
    }
    if (source != kNoBlock) {
        if (host_) host_->note_use(source);
        pool_->add_reader(source);
    }
    if (host_source != kNoBlock) host_->add_reader(host_source);
    if (lease.recurrent.slot == kNoBlock) lease.recurrent.slot = take_slot();
    if (host_source != kNoBlock) return start_move(lease, host_source, MoveRoute::kFromHost);
    start_move(lease, source, MoveRoute::kOnDevice);
}

// The lease computes nothing, and keeps the snapshot of its hit where it is.
void RecurrentState::keep_snapshot(Lease& lease, BlockId source, BlockId host_source) {
    lease.recurrent.read_snapshot = source;
    lease.recurrent.read_host_snapshot = host_source;
    if (source != kNoBlock) pool_->add_reader(source);
    if (host_source != kNoBlock) host_->add_reader(host_source);
}

void RecurrentState::fork(const Lease& parent, Lease& child, Step step) {
    if (!pool_) return;
    child.recurrent.slot = take_slot();
    child.recurrent.valid = true;
    pool_->use_in(parent.recurrent.slot, step);
    pool_->use_in(child.recurrent.slot, step);
}

void RecurrentState::use_in(const Lease& lease, Step step) {
    if (lease.recurrent.slot != kNoBlock) pool_->use_in(lease.recurrent.slot, step);
}

void RecurrentState::start_move(Lease& lease, BlockId source, MoveRoute route) {
    Move move;
    move.lease = lease.id();
    move.sources = {source};
    move.targets = {lease.recurrent.slot};
    move.after_step = pool_->after_step(lease.recurrent.slot);
    move.route = route;
    if (route == MoveRoute::kOnDevice && source != kNoBlock) {
        move.after_step = std::max(move.after_step, pool_->after_step(source));
    }
    lease.onloads.push_back(transfers_.begin_move(std::move(move)));
}

void RecurrentState::finish_move(const Move& move, Outcome outcome) {
    const bool copied = outcome == Outcome::kDone;
    if (move.route == MoveRoute::kToHost) return host_->finish_save(move, copied ? 1 : 0);
    const BlockId source = move.sources[0];
    if (move.route == MoveRoute::kFromHost) {
        host_->finish_read(source, outcome == Outcome::kFailed);
    } else if (source != kNoBlock) {
        pool_->remove_reader(source);
    }
    if (move.lease == 0) {
        pool_->give_back(move.targets[0], 0);
    } else if (copied) {
        restored_ += source != kNoBlock;
        onloaded_ += move.route == MoveRoute::kFromHost;
    }
}

void RecurrentState::orphan_move(Lease& lease, TransferId id, Step step) {
    pool_->use_in(transfers_.move(id).targets[0], step);
    lease.recurrent.slot = kNoBlock;
    transfers_.orphan_move(id);
}

StateCopy RecurrentState::snapshot(Lease& lease, std::int64_t num_tokens, Step step) {
    if (!pool_) {
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
            .hint("commit exactly up to a block border, then take the snapshot");
    }
    if (!lease.flags.writes || lease.is(LeaseState::kFailed) || !index_.is_of_epoch(lease)) {
        return {};
    }
    if (lease.computed_tokens > lease.tokens.size()) return {};
    const std::uint32_t block = lease.computed_tokens / config_.block_tokens - 1;
    if (block < lease.path.size()) {
        const NodeId node = lease.path[block];
        touch(node);
        const BlockId saved = pool_->find(node);
        if (saved != kNoBlock || index_.tree()[node].has(kDetached)) return {};
    }
    const auto is_same = [block](const UnattachedSnapshot& other) { return other.block == block; };
    if (std::any_of(lease.recurrent.snapshots.begin(), lease.recurrent.snapshots.end(), is_same))
        return {};
    if (pool_->room() == 0) return {};
    const BlockId target = take_slot();
    pool_->use_in(lease.recurrent.slot, step);
    pool_->use_in(target, step);
    lease.last_step = std::max(lease.last_step, step);
    lease.recurrent.snapshots.push_back({block, target});
    attach_snapshots(lease);
    return {lease.recurrent.slot, target};
}

void RecurrentState::discard_snapshot(Lease& lease, BlockId slot) {
    const auto unattached =
        std::erase_if(lease.recurrent.snapshots,
                      [slot](const UnattachedSnapshot& other) { return other.slot == slot; });
    if (unattached > 0) return pool_->give_back(slot, 0);
    pool_->forget(pool_->node_of(slot));
    index_.change();
}

// First proof wins.
void RecurrentState::attach_snapshots(Lease& lease) {
    std::erase_if(lease.recurrent.snapshots, [this, &lease](const UnattachedSnapshot& snapshot) {
        if (snapshot.block >= lease.path.size()) return false;
        const NodeId node = lease.path[snapshot.block];
        if (index_.tree()[node].has(kDetached) || pool_->find(node) != kNoBlock) {
            pool_->give_back(snapshot.slot, 0);
            return true;
        }
        pool_->attach(node, snapshot.slot);
        index_.tree()[node].set(kHasSides);
        if (host_) host_->note_use(snapshot.slot);
        index_.change();
        return true;
    });
}

void RecurrentState::forget_snapshots(Lease& lease, Step step) {
    for (const UnattachedSnapshot& snapshot : lease.recurrent.snapshots) {
        pool_->give_back(snapshot.slot, step);
    }
    lease.recurrent.snapshots.clear();
}

void RecurrentState::release(Lease& lease, Step step) {
    if (!pool_) return;
    forget_snapshots(lease, step);
    if (lease.recurrent.slot != kNoBlock) pool_->give_back(lease.recurrent.slot, step);
    if (lease.recurrent.read_snapshot != kNoBlock)
        pool_->remove_reader(lease.recurrent.read_snapshot);
    if (lease.recurrent.read_host_snapshot != kNoBlock)
        host_->remove_reader(lease.recurrent.read_host_snapshot);
    lease.recurrent.slot = lease.recurrent.read_snapshot = kNoBlock;
    lease.recurrent.read_host_snapshot = kNoBlock;
    lease.recurrent.valid = false;
}

void RecurrentState::add_to(CoreStatistics& statistics) const {
    statistics.state_free = pool_ ? pool_->free_ids() : 0;
    statistics.state_snapshots = pool_ ? pool_->attached() : 0;
    statistics.restored_states = restored_;
    statistics.evicted_snapshots = evicted_snapshots_;
    statistics.onloaded_states = onloaded_;
    if (!host_) return;
    statistics.host_state_free = host_->pool().free_ids();
    statistics.host_state_snapshots = host_->pool().attached();
    statistics.saved_snapshots = host_->saved();
    statistics.evicted_host_snapshots = host_->evicted();
}

void RecurrentState::check(Report& report) const {
    if (!pool_) return;
    Ownership slots = report.pool("state", pool_->capacity());
    std::unordered_map<BlockId, std::uint32_t> readers;
    std::unordered_map<BlockId, std::uint32_t> host_readers;
    for (const Lease& lease : leases_) {
        const BlockId on_host = lease.recurrent.read_host_snapshot;
        if (on_host != kNoBlock) ++host_readers[on_host];
        if (lease.recurrent.slot != kNoBlock) slots.own(lease.recurrent.slot, "a lease");
        if (lease.recurrent.read_snapshot != kNoBlock) ++readers[lease.recurrent.read_snapshot];
        for (const UnattachedSnapshot& one : lease.recurrent.snapshots)
            slots.own(one.slot, "a lease");
        report.require(lease.is_open() || lease.recurrent.slot == kNoBlock,
                       "I5: a free lease has a slot");
        const bool has_slot = lease.recurrent.slot != kNoBlock;
        report.require(!lease.has_blocks() || has_slot == lease.flags.computes,
                       "I1: a granted lease has ", has_slot ? "a" : "no", " state slot");
        report.require(!lease.recurrent.valid || has_slot, "I1: a valid state has no slot");
    }
    for (const auto& [id, move] : transfers_.moves()) {
        if (move.group != kRecurrentState) continue;
        const BlockId source = move.sources[0];
        const BlockId target = move.targets[0];
        if (source != kNoBlock && move.route != MoveRoute::kFromHost) ++readers[source];
        if (move.route == MoveRoute::kToHost) continue;
        if (move.lease == 0) slots.own(target, "a move");
        report.require(move.lease == 0 || leases_.at(move.lease).recurrent.slot == target,
                       "I3: the target of state move ", id, " changed under way");
    }
    std::uint32_t attached = 0;
    for (BlockId id = 0; static_cast<std::uint32_t>(id) < pool_->capacity(); ++id) {
        const bool is_attached = pool_->is_attached(id);
        const std::uint32_t held = readers.contains(id) ? readers.at(id) : 0;
        attached += is_attached;
        if (is_attached || held > 0) slots.own(id, "a snapshot");
        report.require(pool_->readers(id) == held, "I5: state slot ", id, " counts ",
                       pool_->readers(id), " readers of ", held);
        if (!is_attached) continue;
        const NodeId node = pool_->node_of(id);
        const bool live =
            index_.tree().is_live(node) && !index_.tree()[node].has(kDetached | kRoot);
        report.require(live && index_.tree()[node].has(kHasSides) && pool_->find(node) == id,
                       "I2: the node of snapshot ", id, " does not know it");
    }
    report.require(attached == pool_->attached(), "I1: ", pool_->attached(), " of ", attached,
                   " snapshots are listed");
    slots.check([this](BlockId id) { return pool_->is_free(id); });
    if (host_) host_->check(report, "host state", std::move(host_readers));
}

}  // namespace aiokv
