// All block groups besides attention: recurrent state and sliding windows, or those of a server.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "aiokv/block_group.hpp"
#include "aiokv/error.hpp"
#include "aiokv/external_groups.hpp"
#include "aiokv/recurrent_state.hpp"
#include "aiokv/sliding_windows.hpp"

namespace aiokv {

class AuxiliaryGroups {
  public:
    AuxiliaryGroups(RecurrentState& state, SlidingWindows& windows, ExternalGroups& external)
        : state_(state), windows_(windows), external_(external) {
        for (WindowGroup& group : windows.groups()) groups_.push_back(&group);
        for (BlockGroup& group : external.groups()) groups_.push_back(&group);
        if (state.group() != nullptr) groups_.push_back(state.group());
    }

    bool exist() const { return !groups_.empty(); }
    // Window groups or external groups in the order of their numbers, then recurrent state.
    std::span<BlockGroup* const> all() const { return groups_; }
    // Throws UsageError: the model has no such group.
    const BlockGroup& group(GroupId number) const {
        for (const BlockGroup* group : groups_) {
            if (group->number() == number) return *group;
        }
        throw UsageError("the cache has no block group " + std::to_string(number));
    }

    // -- hits and nodes of the index
    // Returns true if a hit may end behind the first `blocks` of the path.
    bool covers(std::span<const NodeId> path, std::size_t blocks) const {
        return std::all_of(groups_.begin(), groups_.end(),
                           [&](const BlockGroup* group) { return group->covers(path, blocks); });
    }
    // Returns true if the ids that this hit takes from host memory can be written on the device
    // now.
    bool can_onload(std::span<const NodeId> path, std::size_t blocks) const {
        return windows_.can_onload(path, blocks);
    }
    void touch_hit(std::span<const NodeId> path) {
        for (BlockGroup* group : groups_) group->touch_hit(path);
    }
    void forget(NodeId node) {
        for (BlockGroup* group : groups_) group->forget(node);
        external_.forget(node);
    }
    void forget_device() {
        for (BlockGroup* group : groups_) group->pool.forget_all();
    }
    void forget_host() {
        for (BlockGroup* group : groups_) group->forget_host();
    }

    // Call once, before the first lease, if there are stores below host memory.
    void connect_stores(StoredBlocks& stored, Residency& residency) {
        for (BlockGroup* group : groups_) {
            if (group->host) group->host->connect_stores(stored, residency);
        }
    }

    // -- ids of leases
    bool has_room(const Lease& lease, std::uint32_t total_blocks) const {
        return state_.has_room(lease) && windows_.has_room(lease, total_blocks);
    }
    // Returns true if a swapped lease still has its state and windows, so that it can be resumed.
    bool are_kept(const Lease& lease) const {
        return state_.is_kept(lease) && windows_.is_kept(lease);
    }
    static bool has_ids(const Lease& lease) {
        return lease.recurrent.slot != kNoBlock || !lease.windows.empty();
    }
    void take(Lease& lease) {
        state_.take(lease);
        windows_.take(lease);
        external_.take(lease);
    }
    void use_in(const Lease& lease, Step step) {
        state_.use_in(lease, step);
        windows_.use_in(lease, step);
    }
    void release(Lease& lease, Step step) {
        state_.release(lease, step);
        windows_.release(lease, step);
        external_.release(lease);
    }

    // -- moves
    // Call after the end of a move. The first `good` ids are proven.
    void finish_move(const Move& move, Outcome outcome, std::uint32_t good) {
        if (move.group == kRecurrentState) {
            state_.finish_move(move, outcome);
        } else {
            windows_.finish_move(move, good, outcome == Outcome::kFailed);
        }
    }
    // The lease gives back the ids that the move still writes. The move owns them from now on (I3).
    void orphan_move(Lease& lease, TransferId id, GroupId group, Step step) {
        if (group == kRecurrentState) {
            state_.orphan_move(lease, id, step);
        } else if (external_.exist()) {
            external_.orphan_move(id);
        } else {
            windows_.orphan_move(lease, id, step);
        }
    }
    // Returns true if ids are queued for a save to host memory.
    bool want_saves() const {
        return external_.wants_saves() ||
               std::any_of(groups_.begin(), groups_.end(), [](const BlockGroup* group) {
                   return group->host && group->host->wants_saves();
               });
    }
    // Begins a save of one group. Returns 0 if there is nothing to copy.
    TransferId take_save() {
        if (external_.exist()) return external_.take_save();
        const TransferId id = state_.take_save();
        return id != 0 ? id : windows_.take_save();
    }

    // -- steps
    void close_step(Step step) {
        for (BlockGroup* group : groups_) group->pool.close_step(step);
    }
    void finish_step(Step step) {
        for (BlockGroup* group : groups_) group->pool.finish_step(step);
    }
    Step unfinished_step() const {
        Step newest = 0;
        for (const BlockGroup* group : groups_) {
            newest = std::max(newest, group->pool.unfinished_step());
        }
        return newest;
    }

    // Returns zeros for recurrent state that the model does not have.
    GroupStatistics statistics(GroupId number) const {
        if (number == kRecurrentState && !state_.exists()) return {};
        GroupStatistics s = group(number).statistics();
        if (number >= 0 && !external_.exist())
            s.set_aside_blocks = windows_.group(static_cast<std::size_t>(number)).reserved;
        return s;
    }

  private:
    RecurrentState& state_;
    SlidingWindows& windows_;
    ExternalGroups& external_;
    std::vector<BlockGroup*> groups_;
};

}  // namespace aiokv
