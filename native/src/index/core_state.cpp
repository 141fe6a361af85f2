// Recurrent state (linear attention, state-space layers): slots, and snapshots at block borders.
//
// State cannot be read again up to a shorter prefix, so a granted lease has a slot of its own that
// the model overwrites, and a prefix can be hit only where a snapshot was saved: the state
// after the last position of that block. A grant copies the snapshot into the lease's slot, or
// zeroes the slot, as a transfer that the lease waits for. Snapshots have an eviction order of
// their own; to lose one costs no block.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

// `blocks`, or fewer: where a hit may end, for multimodal items and for the side pools.
std::size_t Core::reachable(const Lease& lease, std::size_t blocks) const {
    blocks = before_cut_item(lease, blocks);
    while (blocks > 0 && !can_resume(lease.path, blocks)) {
        blocks = before_cut_item(lease, blocks - 1);
    }
    return blocks;
}

bool Core::can_resume(const std::vector<NodeId>& path, std::size_t blocks) const {
    if (state_ && !covers(*state_, path, blocks)) return false;
    return std::all_of(windows_.begin(), windows_.end(),
                       [&](const WindowGroup& group) { return covers(group.pool, path, blocks); });
}

// Only what the hit needs: blocks between head and tail of a side pool are not needed.
void Core::touch_sides(const std::vector<NodeId>& path) {
    const auto touch_needed = [&path](SidePool& pool) {
        const std::size_t head = std::min<std::size_t>(path.size(), pool.head_blocks());
        const std::size_t tail = std::min<std::size_t>(path.size(), pool.tail_blocks());
        for (std::size_t i = path.size(); i-- > path.size() - tail;) pool.touch(pool.find(path[i]));
        for (std::size_t i = head; i-- > 0;) pool.touch(pool.find(path[i]));
    };
    if (state_) touch_needed(*state_);
    for (WindowGroup& group : windows_) touch_needed(group.pool);
}

// What a swapped lease needs to go on where it stopped is still its own.
bool Core::has_own_sides(const Lease& lease) const {
    return (!state_ || lease.state_valid) && lease.windows.size() == windows_.size();
}

// A swapped lease keeps its state slot and windows as long as no other lease needs them: it waits
// in line like others, and must not delay leases in front of it. Without them it goes on at the
// deepest border that can be hit. While a lease computes, its end is waited for instead; a pin may
// never end.
bool Core::make_side_room(const Lease& lease, std::uint32_t total_blocks) {
    if (has_state_room(lease) && has_window_room(lease, total_blocks)) return true;
    const bool waits = !moves_.empty() || computing_leases_ > 0;
    auto victim = waits ? leases_.end() : leases_.begin();
    while (!has_state_room(lease) || !has_window_room(lease, total_blocks)) {
        victim = std::find_if(victim, leases_.end(), [&](const Lease& other) {
            return other.live && other.swapped && &other != &lease &&
                   (other.state_slot != kNoBlock || !other.windows.empty());
        });
        if (victim == leases_.end()) return false;
        give_state_back(*victim, 0);
        give_windows_back(*victim, 0);
        trim_swapped(*victim);
    }
    return true;
}

// `step` may still read or write what the lease has in the side pools.
void Core::use_sides(const Lease& lease, Step step) {
    if (lease.state_slot != kNoBlock) state_->use_in(lease.state_slot, step);
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        const WindowTable& window = lease.windows[g];
        SidePool& pool = windows_[g].pool;
        for (std::size_t i = 0; i < window.first && windows_[g].is_sink(i); ++i) {
            pool.use_in(window.table[i], step);
        }
        for (std::size_t i = window.first; i < window.end; ++i) pool.use_in(window.table[i], step);
    }
}

void Core::hold_only(LeaseId id, bool whole) {
    Lease& lease = lease_at(id);
    if (lease.granted || lease.swapped) throw LeaseError("the lease has its blocks already");
    lease.computes = false;
    lease.whole = whole;
    if (whole) walk(lease);
}

bool Core::has_state_room(const Lease& lease) const {
    return !state_ || !lease.computes || lease.state_slot != kNoBlock || state_->room() > 0;
}

BlockId Core::take_slot() {
    BlockId slot = kNoBlock;
    if (state_->take(slot)) {
        ++counters_.evicted_snapshots;
        ++version_;
    }
    return slot;
}

// The lease's path is final, and has_state_room() was true. Where the snapshot that the lease hits
// has the only slot to be had, the lease takes that over: there is nothing to copy then.
void Core::take_state(LeaseId id, Lease& lease) {
    if (!state_ || lease.state_valid) return;
    const BlockId source = lease.path.empty() ? kNoBlock : state_->find(lease.path.back());
    if (!lease.computes) {
        lease.held_snapshot = source;
        if (source != kNoBlock) state_->hold(source);
        return;
    }
    lease.state_valid = true;
    const std::uint32_t idle_source = source != kNoBlock && state_->is_idle(source);
    if (lease.state_slot == kNoBlock && idle_source > 0 && state_->room() == 1) {
        state_->detach(source);
        lease.state_slot = source;
        ++version_;
        return;
    }
    if (source != kNoBlock) state_->hold(source);
    if (lease.state_slot == kNoBlock) lease.state_slot = take_slot();
    start_move(id, lease, source);
}

void Core::start_move(LeaseId id, Lease& lease, BlockId source) {
    const TransferId move_id = ++last_transfer_;
    StateMove move{id, source, lease.state_slot, state_->after_step(lease.state_slot)};
    if (source != kNoBlock) move.after_step = std::max(move.after_step, state_->after_step(source));
    moves_[move_id] = move;
    lease.onloads.push_back(move_id);
}

const StateMove& Core::state_move(TransferId id) const {
    const auto found = moves_.find(id);
    if (found == moves_.end()) throw UsageError("no state is moved by " + std::to_string(id));
    return found->second;
}

void Core::finish_move(TransferId id, Outcome outcome) {
    const StateMove move = moves_.at(id);
    moves_.erase(id);
    if (move.source != kNoBlock) state_->unhold(move.source);
    if (move.lease == 0) return state_->give_back(move.target, 0);
    Lease& lease = lease_at(move.lease);
    if (outcome == Outcome::kDone) {
        counters_.restored_states += move.source != kNoBlock;
    } else {
        fail_lease(lease, 0);
    }
    std::erase(lease.onloads, id);
    if (lease.onloads.empty()) publish(lease);
}

// The lease goes while its slot is written: the slot is the move's from now on (I3).
void Core::orphan_move(StateMove& move, Step step) {
    Lease& lease = lease_at(move.lease);
    state_->use_in(move.target, step);
    lease.state_slot = kNoBlock;
    move.lease = 0;
}

// The state after exactly the committed positions, for their last block. The copy is the caller's,
// in `step`, before anything that changes the state again.
StateCopy Core::snapshot(LeaseId id, std::int64_t num_tokens, Step step) {
    Lease& lease = lease_at(id);
    if (!state_) throw UsageError("the model has no recurrent state; see CacheConfig.state_slots");
    if (!lease.granted || lease.swap_out != 0 || !lease.computes) {
        throw LeaseError("cannot save the state of a lease that is not granted");
    }
    if (num_tokens != lease.computed_tokens || num_tokens < 1 ||
        num_tokens % config_.block_tokens != 0) {
        throw LeaseError("cannot save the state after " + std::to_string(num_tokens) +
                         " positions: " + str(lease.computed_tokens) +
                         " are committed, and a block has " + str(config_.block_tokens));
    }
    if (!lease.writes || lease.failed || lease.epoch != epoch_) return {};
    if (lease.computed_tokens > lease.tokens.size()) return {};
    const std::uint32_t block = lease.computed_tokens / config_.block_tokens - 1;
    if (block < lease.path.size()) {
        const NodeId node = lease.path[block];
        const BlockId saved = state_->find(node);
        if (saved != kNoBlock) state_->touch(saved);
        if (saved != kNoBlock || tree_[node].has(kDetached)) return {};
    }
    const auto is_same = [block](const UnattachedSnapshot& other) { return other.block == block; };
    if (std::any_of(lease.snapshots.begin(), lease.snapshots.end(), is_same)) return {};
    if (state_->room() == 0) return {};
    const BlockId target = take_slot();
    state_->use_in(lease.state_slot, step);
    state_->use_in(target, step);
    lease.last_step = std::max(lease.last_step, step);
    lease.snapshots.push_back({block, target});
    attach_snapshots(lease);
    return {lease.state_slot, target};
}

// The copy was not made: no lease may hit there.
void Core::discard_snapshot(LeaseId id, BlockId slot) {
    Lease& lease = lease_at(id);
    const auto unattached = std::erase_if(
        lease.snapshots, [slot](const UnattachedSnapshot& other) { return other.slot == slot; });
    if (unattached > 0) return state_->give_back(slot, 0);
    state_->forget(state_->node_of(slot));
    ++version_;
}

// Those whose block is indexed by now; first proof wins.
void Core::attach_snapshots(Lease& lease) {
    std::erase_if(lease.snapshots, [this, &lease](const UnattachedSnapshot& snapshot) {
        if (snapshot.block >= lease.path.size()) return false;
        const NodeId node = lease.path[snapshot.block];
        if (tree_[node].has(kDetached) || state_->find(node) != kNoBlock) {
            state_->give_back(snapshot.slot, 0);
            return true;
        }
        state_->attach(node, snapshot.slot);
        tree_[node].set(kHasSides);
        ++version_;
        return true;
    });
}

void Core::forget_snapshots(Lease& lease, Step step) {
    for (const UnattachedSnapshot& snapshot : lease.snapshots) {
        state_->give_back(snapshot.slot, step);
    }
    lease.snapshots.clear();
}

void Core::give_state_back(Lease& lease, Step step) {
    if (!state_) return;
    forget_snapshots(lease, step);
    if (lease.state_slot != kNoBlock) state_->give_back(lease.state_slot, step);
    if (lease.held_snapshot != kNoBlock) state_->unhold(lease.held_snapshot);
    lease.state_slot = lease.held_snapshot = kNoBlock;
    lease.state_valid = false;
}

// Where the state is worth saving: where this prompt leaves what is cached, since others may part
// there too, and at the last border that an equal prompt can hit.
std::vector<std::uint32_t> Core::snapshot_points(LeaseId id) const {
    const Lease& lease = this->lease(id);
    if (!state_ || !lease.writes || !lease.computes) return {};
    const std::size_t hit =
        lease.granted ? lease.cached_tokens / config_.block_tokens : lease.path.size();
    std::vector<std::uint32_t> points;
    for (const std::size_t blocks : {std::size_t{lease.known_blocks},
                                     before_cut_item(lease, border_before(lease.prompt_tokens))}) {
        const auto tokens = static_cast<std::uint32_t>(blocks * config_.block_tokens);
        if (blocks > hit && (points.empty() || points.back() < tokens)) points.push_back(tokens);
    }
    return points;
}

}  // namespace aiokv
