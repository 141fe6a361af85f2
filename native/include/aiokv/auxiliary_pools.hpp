// The auxiliary pools together: recurrent state and sliding windows.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "aiokv/recurrent_state.hpp"
#include "aiokv/sliding_windows.hpp"

namespace aiokv {

class AuxiliaryPools {
  public:
    AuxiliaryPools(RecurrentState& state, SlidingWindows& windows)
        : state_(state), windows_(windows) {}

    bool exist() const { return state_.exists() || windows_.exist(); }

    // A hit of the first `blocks` of the path may end there.
    bool covers(std::span<const NodeId> path, std::size_t blocks) const {
        return state_.covers(path, blocks) && windows_.covers(path, blocks);
    }
    // The ids that such a hit takes from host memory can be written on the device now.
    bool can_onload(std::span<const NodeId> path, std::size_t blocks) const {
        return windows_.can_onload(path, blocks);
    }
    void touch_hit(std::span<const NodeId> path) {
        state_.touch_hit(path);
        windows_.touch_hit(path);
    }
    void forget(NodeId node) {
        state_.forget(node);
        windows_.forget(node);
    }
    void forget_device() {
        state_.forget_device();
        windows_.forget_device();
    }
    void forget_host() {
        state_.forget_host();
        windows_.forget_host();
    }

    // To be called once, before the first lease, where stores have what is in host memory, too.
    void connect_stores(StoredBlocks& stored, Residency& residency) {
        state_.connect_stores(stored, residency);
        windows_.connect_stores(stored, residency);
    }
    // Of the pools that are connected.
    std::vector<AuxiliaryStore*> stores() {
        std::vector<AuxiliaryStore*> stores = windows_.stores();
        if (AuxiliaryStore* snapshots = state_.stores()) stores.push_back(snapshots);
        return stores;
    }

    bool has_room(const Lease& lease, std::uint32_t total_blocks) const {
        return state_.has_room(lease) && windows_.has_room(lease, total_blocks);
    }
    // A swapped lease can go on where it stopped.
    bool are_kept(const Lease& lease) const {
        return state_.is_kept(lease) && windows_.is_kept(lease);
    }
    static bool has_ids(const Lease& lease) {
        return lease.recurrent.slot != kNoBlock || !lease.windows.empty();
    }
    void take(Lease& lease) {
        state_.take(lease);
        windows_.take(lease);
    }
    void use_in(const Lease& lease, Step step) {
        state_.use_in(lease, step);
        windows_.use_in(lease, step);
    }
    // After the end of a move, of which the first `good` ids are proven.
    void finish_move(const Move& move, Outcome outcome, std::uint32_t good) {
        if (move.group == kRecurrentState) {
            state_.finish_move(move, outcome);
        } else {
            windows_.finish_move(move, good, outcome == Outcome::kFailed);
        }
    }
    // The lease gives back the ids that the move writes: the move owns them from now on (I3).
    void orphan_move(Lease& lease, TransferId id, std::int32_t group, Step step) {
        if (group == kRecurrentState) {
            state_.orphan_move(lease, id, step);
        } else {
            windows_.orphan_move(lease, id, step);
        }
    }
    // Saves of indexed ids to host memory.
    bool want_saves() const { return state_.wants_saves() || windows_.want_saves(); }
    void release(Lease& lease, Step step) {
        state_.release(lease, step);
        windows_.release(lease, step);
    }

    void close_step(Step step) {
        state_.close_step(step);
        windows_.close_step(step);
    }
    void finish_step(Step step) {
        state_.finish_step(step);
        windows_.finish_step(step);
    }
    Step unfinished_step() const {
        return std::max(state_.unfinished_step(), windows_.unfinished_step());
    }

  private:
    RecurrentState& state_;
    SlidingWindows& windows_;
};

}  // namespace aiokv
