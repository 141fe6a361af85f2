// Forecast of Residency::make_room(): would it succeed now? Evicts nothing.
//
// Not all evictable blocks can be evicted now: a block that a transfer reads, or that the write
// policy saves first, stays, and so do its ancestors. So the forecast walks the eviction queue as
// make_room() does, and records in its own sets which blocks would be evicted. It takes as long as
// the attempt.
#pragma once

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "aiokv/residency.hpp"

namespace aiokv {

class Residency::Forecast {
  public:
    // `path`: final path of the lease, on which the grant takes refs first. `host_freed`: the grant
    // also frees host blocks. `unheld`: nodes whose host copies a swapped lease would give up, so
    // that they can be reclaimed. `share`: of the lease's salt.
    Forecast(Residency& residency, std::span<const NodeId> path, std::uint32_t share = 0,
             bool host_freed = false, std::vector<NodeId> unheld = {})
        : residency_(residency),
          tree_(residency.tree_),
          lease_path_(path),
          free_(residency.device_.free_blocks()),
          unheld_(std::move(unheld)),
          host_freed_(host_freed),
          served_before_(residency.evictable_.serve_forecast(share)) {
        path_.insert(path.begin(), path.end());
        const auto on_host = std::count_if(path_.begin(), path_.end(), [this](NodeId node) {
            return tree_.run(node).has(kQueued) && !tree_[node].has(kDeviceValid);
        });
        host_usable_ = residency.host_.free_blocks() > 0 || !residency.host_copies_.empty() ||
                       !unheld_.empty() || host_freed ||
                       residency.evictable_.queued_host() > static_cast<std::uint32_t>(on_host);
    }

    ~Forecast() { residency_.evictable_.serve_forecast(served_before_); }
    Forecast(const Forecast&) = delete;
    Forecast& operator=(const Forecast&) = delete;

    // Number of device blocks of the path that count as evictable until the lease has its refs.
    std::uint32_t evictable_path() const {
        const auto counts = [this](NodeId node) {
            return tree_[node].has(kDeviceValid) && residency_.evictable_.is_listed(node);
        };
        const auto count = std::count_if(lease_path_.begin(), lease_path_.end(), counts);
        return static_cast<std::uint32_t>(count);
    }

    std::uint32_t free_blocks() const { return free_; }

    // Returns what make_room() would return now.
    bool can_make_room(std::uint32_t blocks) {
        NodeId node = residency_.evictable_.device_front();
        while (free_ < blocks) {
            NodeId next = take_returned(node);
            if (next == kNone) {
                if (node == kNone) break;
                if (!is_out_of_queue(node)) next = node;
                node = residency_.evictable_.after_on_device(node);
            }
            while (next != kNone && free_ < blocks) {
                blocked_ = attempt(next);
                if (blocked_ != kNone) return false;
            }
        }
        return free_ >= blocks;
    }

    // Call after can_make_room() was false. Returns true if Saver::take_write_backs() would find
    // nothing to save, because the host has no room at all, and would let eviction drop the first
    // unsaved blocks.
    bool may_drop_unsaved(std::uint32_t wanted_blocks) {
        if (blocked_ == kNone || tree_[blocked_].has(kHostLoading)) return false;
        std::vector<NodeId> dirty;
        std::unordered_set<NodeId> clean;
        const std::uint32_t target =
            std::max(wanted_blocks, residency_.config_.low_watermark_blocks);
        std::uint32_t ready = free_;
        const auto look_at = [&](NodeId node) {
            if (tree_[node].has(kHostValid)) clean.insert(node);
            if (is_unsaved(node)) dirty.push_back(node);
            ++ready;
        };
        // A parent whose last child on the device is gone returns to the front.
        if (tree_.run(blocked_).has(kParked) || deferred_.contains(blocked_)) look_at(blocked_);
        for (NodeId node = residency_.evictable_.device_front(); node != kNone && ready < target;
             node = residency_.evictable_.after_on_device(node)) {
            if (!is_out_of_queue(node)) look_at(node);
        }
        residency_.evictable_.visit_unsaved_parked([&](NodeId node) {
            if (is_unsaved(node)) dirty.push_back(node);
        });
        for (const NodeId node : deferred_) {
            if (is_unsaved(node)) dirty.push_back(node);
        }
        // The failed attempt has put the path at the end of the queue, its last block first.
        for (std::size_t i = lease_path_.size(); i-- > 0 && ready < target;) {
            const Node& n = tree_[lease_path_[i]];
            if (tree_.refs(lease_path_[i]) == 0 && n.has(kDeviceValid)) look_at(lease_path_[i]);
        }
        if (host_has_room(clean)) return false;
        droppable_.insert(dirty.begin(), dirty.end());
        host_usable_ = any_host_copy([&](NodeId copied) { return clean.contains(copied); });
        return true;
    }

    // Number of device ids that would be free and that a transfer may write, as in
    // Grants::fit_writable().
    std::uint32_t writable_blocks() const {
        const auto is_writable = [this](NodeId node) {
            return residency_.device_.is_writable(tree_[node].device);
        };
        const auto count = std::count_if(gone_.begin(), gone_.end(), is_writable);
        return residency_.device_.writable_blocks() + static_cast<std::uint32_t>(count);
    }

    // Removes the blocks from `blocks` on from the path, because the grant gives them up.
    void shorten_path(std::size_t blocks) {
        for (std::size_t i = blocks; i < lease_path_.size(); ++i) path_.erase(lease_path_[i]);
    }

  private:
    bool is_out_of_queue(NodeId node) const {
        return gone_.contains(node) || deferred_.contains(node) || path_.contains(node);
    }

    std::uint32_t device_children(NodeId node) const {
        const auto found = gone_children_.find(node);
        const std::uint32_t gone = found == gone_children_.end() ? 0 : found->second.first;
        return tree_.device_children(node) - gone;
    }

    bool has_child(NodeId node) const {
        const auto found = gone_children_.find(node);
        const std::uint32_t dropped = found == gone_children_.end() ? 0 : found->second.second;
        return tree_.children(node) > dropped;
    }

    // Returns true if look_ahead() would save the node.
    bool is_unsaved(NodeId node) const {
        return !is_saved(tree_[node]) && residency_.can_save(node);
    }

    bool must_save(NodeId node) const {
        if (residency_.config_.write_policy == SavePolicy::kNone) return false;
        const bool may_go = tree_[node].has(kHostValid | kBackupFailed) ||
                            droppable_.contains(node) || !residency_.can_save(node);
        return !may_go && host_usable_;
    }

    // Forecasts evict_one_device() with `node` at the front. Returns the node that stops eviction,
    // or kNone. Sets `node` to the parent that returns to the front, or to kNone if the next node
    // of the queue follows.
    NodeId attempt(NodeId& node) {
        const Node& n = tree_[node];
        if (n.pins > 0 || device_children(node) > 0) {
            if (residency_.waits_for_save(node)) return node;
            deferred_.insert(node);
            node = kNone;
            return kNone;
        }
        if (must_save(node)) return node;
        const bool dropped = !n.has(kHostValid);
        host_freed_ |= dropped && has_child(node);  // the host copies below it are dropped, too
        host_usable_ |= !dropped || host_freed_;
        ++free_;
        gone_.insert(node);
        deferred_.erase(node);
        const NodeId parent = tree_.parent(node);
        ++gone_children_[parent].first;
        gone_children_[parent].second += dropped;
        const bool waits = tree_.run(parent).has(kParked) || deferred_.contains(parent);
        const bool is_free = !path_.contains(parent) && tree_[parent].pins == 0 &&
                             tree_[parent].has(kDeviceValid) && device_children(parent) == 0;
        if (!waits || !is_free) {
            node = kNone;
        } else if (residency_.evictable_.device_rank(parent) <=
                   residency_.evictable_.device_rank(node)) {
            node = parent;
        } else {
            returned_.push_back(parent);
            node = kNone;
        }
        return kNone;
    }

    // Removes and returns the block at the front of a part that is evicted before `node`, or is
    // that of `node`, among the blocks that have returned to the front of theirs; or kNone.
    NodeId take_returned(NodeId node) {
        const EvictableBlocks& evictable = residency_.evictable_;
        const auto rank = [&](NodeId returned) { return evictable.device_rank(returned); };
        const auto first = std::ranges::min_element(returned_.rbegin(), returned_.rend(), {}, rank);
        if (first == returned_.rend()) return kNone;
        if (node != kNone && rank(*first) > evictable.device_rank(node)) return kNone;
        const NodeId returned = *first;
        returned_.erase(std::next(first).base());
        return returned;
    }

    // Returns true if make_host_room() would free a block without reclaiming host copies of
    // `clean`.
    bool host_has_room(const std::unordered_set<NodeId>& clean) const {
        if (residency_.host_.free_blocks() > 0 || host_freed_) return true;
        if (any_host_copy([&](NodeId copied) {
                return !clean.contains(copied) && !gone_.contains(copied) &&
                       !tree_.run(copied).has(kParked) && !deferred_.contains(copied);
            })) {
            return true;
        }
        const auto is_leaf = [this](NodeId node) {
            return tree_[node].pins == 0 && tree_[node].holds == 0 && !has_child(node);
        };
        for (NodeId node = residency_.evictable_.host_front(); node != kNone;
             node = residency_.evictable_.after_on_host(node)) {
            if (is_leaf(node)) return true;
        }
        return std::any_of(gone_.begin(), gone_.end(), [&](NodeId node) {
            return tree_[node].has(kHostValid) && is_leaf(node);
        });
    }

    template <class Predicate>
    bool any_host_copy(Predicate is_wanted) const {
        if (std::any_of(unheld_.begin(), unheld_.end(), is_wanted)) return true;
        BlockId host = residency_.host_copies_.first();
        while (host != kNoBlock && !is_wanted(residency_.host_copies_.node_of(host))) {
            host = residency_.host_copies_.after(host);
        }
        return host != kNoBlock;
    }

    Residency& residency_;
    const PrefixTree& tree_;
    std::span<const NodeId> lease_path_;
    std::uint32_t free_;
    std::vector<NodeId> unheld_;
    bool host_freed_;   // a drop would have freed host blocks
    bool host_usable_;  // for must_save()
    const std::uint32_t served_before_;
    std::vector<NodeId> returned_;  // to the front of a part that is evicted later
    NodeId blocked_ = kNone;        // the node that stopped can_make_room()
    std::unordered_set<NodeId> path_;
    std::unordered_set<NodeId> gone_;
    std::unordered_set<NodeId> deferred_;
    std::unordered_set<NodeId> droppable_;
    std::unordered_map<NodeId, std::pair<std::uint32_t, std::uint32_t>>
        gone_children_;  // by parent: children evicted, and children dropped
};

}  // namespace aiokv
