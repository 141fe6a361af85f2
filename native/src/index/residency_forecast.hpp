// Forecast of Residency::make_room(): would it succeed now? Evicts nothing.
//
// Not all evictable blocks can be evicted now: a block that a transfer reads, or that the write
// policy saves first, stays, and so do its ancestors. So the forecast walks the eviction queue as
// make_room() does, and records in its own sets which blocks would be evicted. It takes as long as
// the attempt.
#pragma once

#include <algorithm>
#include <map>
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
          share_(share),
          served_before_(residency.evictable_.serve_forecast(share)) {
        path_.insert(path.begin(), path.end());
        reserved_change_ = -std::count_if(path_.begin(), path_.end(), [this](NodeId node) {
            return tree_.run(node).has(kReserved) && tree_[node].has(kDeviceValid);
        });
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
        std::erase_if(moved_, [this](const auto& moved) { return path_.contains(moved.second); });
        blocked_ = kNone;
        NodeId cursor = residency_.evictable_.device_front();
        while (free_ < blocks) {
            const NodeId node = take_next(cursor);
            if (node == kNone) return false;
            if (!attempt(node)) continue;
            if (!is_in_queue(node)) put_in_front(node);
            blocked_ = node;
            return false;
        }
        return true;
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
        put_back(lease_path_);  // as the failed attempt does
        const auto moved = moved_;
        NodeId cursor = residency_.evictable_.device_front();
        while (ready < target) {
            const NodeId node = take_next(cursor);
            if (node == kNone) break;
            look_at(node);
        }
        moved_ = moved;
        residency_.evictable_.visit_unsaved_parked([&](NodeId node) {
            if (is_unsaved(node) && is_deferred(node)) dirty.push_back(node);
        });
        for (const NodeId node : deferred_) {
            if (is_unsaved(node)) dirty.push_back(node);
        }
        if (host_has_room(clean)) return false;
        droppable_.insert(dirty.begin(), dirty.end());
        host_usable_ = any_host_copy(
            [&](NodeId copied) { return clean.contains(copied) || is_deferred(copied); });
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
        const std::span<const NodeId> given_up = lease_path_.subspan(blocks);
        put_back(given_up);
        for (const NodeId node : given_up) path_.erase(node);
        returned_.insert(given_up.begin(), given_up.end());
    }

  private:
    using Rank = PreferredQueue::Rank;
    enum class Side : std::uint8_t { kFront, kInQueue, kBack };  // of the part of a rank

    // Returns true if the block, which is or was in the queue, has its old place there.
    bool is_in_queue(NodeId node) const {
        return !gone_.contains(node) && !deferred_.contains(node) && !path_.contains(node) &&
               !returned_.contains(node) && !displaced_.contains(node);
    }

    bool is_deferred(NodeId node) const {
        return deferred_.contains(node) || (tree_.run(node).has(kParked) && !gone_.contains(node) &&
                                            !path_.contains(node) && !returned_.contains(node));
    }

    Rank rank_of(NodeId node) const {
        return displaced_.contains(node) ? residency_.evictable_.level_rank(node)
                                         : residency_.evictable_.device_rank(node);
    }

    void put_in_front(NodeId node) {
        const std::pair place(rank_of(node), Side::kFront);
        moved_.emplace_hint(moved_.lower_bound(place), place, node);
    }

    // Returns the next victim of rank `from` or higher, and removes it: a block that has moved, or
    // the first one in its old place from `cursor` on; or kNone.
    NodeId take_next(NodeId& cursor, Rank from = 0) {
        while (cursor != kNone && !is_in_queue(cursor)) {
            cursor = residency_.evictable_.after_on_device(cursor);
        }
        const auto moved = moved_.lower_bound({from, Side::kFront});
        if (moved != moved_.end() &&
            (cursor == kNone || moved->first < std::pair(rank_of(cursor), Side::kInQueue))) {
            const NodeId node = moved->second;
            moved_.erase(moved);
            return node;
        }
        const NodeId node = cursor;
        if (cursor != kNone) cursor = residency_.evictable_.after_on_device(cursor);
        return node;
    }

    // Puts blocks of the path, as used now, to the ends of their parts, the last one first. They
    // displace others from a full share.
    void put_back(std::span<const NodeId> path) {
        const EvictableBlocks& evictable = residency_.evictable_;
        std::uint32_t entered = 0;
        for (std::size_t i = path.size(); i-- > 0;) {
            const NodeId node = path[i];
            if (tree_.refs(node) > 0 || !tree_[node].has(kDeviceValid)) continue;
            moved_.emplace(std::pair(evictable.used_rank(node), Side::kBack), node);
            ++entered;
        }
        if (share_ == 0 || entered == 0) return;
        const Rank reserved = evictable.used_rank(path.front());
        NodeId cursor = evictable.first_reserved(share_);
        std::uint32_t excess = evictable.excess_of(share_, reserved_change_ + entered);
        for (excess = std::min(excess, entered); excess > 0; --excess) {
            const NodeId node = take_next(cursor, reserved);
            moved_.emplace(std::pair(evictable.level_rank(node), Side::kBack), node);
            if (path_.contains(node)) continue;
            displaced_.insert(node);
            --reserved_change_;
        }
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

    // Forecasts evict_one_device() with `node` at the front. Returns true if it stops eviction.
    bool attempt(NodeId node) {
        const Node& n = tree_[node];
        if (n.pins > 0 || device_children(node) > 0) {
            if (residency_.waits_for_save(node)) return true;
            deferred_.insert(node);
            returned_.erase(node);
            return false;
        }
        if (must_save(node)) return true;
        const bool dropped = !n.has(kHostValid);
        host_freed_ |= dropped && has_child(node);  // the host copies below it are dropped, too
        host_usable_ |= !dropped || host_freed_;
        ++free_;
        gone_.insert(node);
        reserved_change_ -= tree_.run(node).has(kReserved) && tree_.run(node).share == share_ &&
                            !displaced_.contains(node);
        const NodeId parent = tree_.parent(node);
        ++gone_children_[parent].first;
        gone_children_[parent].second += dropped;
        if (is_deferred(parent) && tree_[parent].pins == 0 && tree_[parent].has(kDeviceValid) &&
            device_children(parent) == 0) {
            deferred_.erase(parent);
            returned_.insert(parent);
            put_in_front(parent);
        }
        return false;
    }

    // Returns true if make_host_room() would free a block without reclaiming host copies of
    // `clean`.
    bool host_has_room(const std::unordered_set<NodeId>& clean) const {
        if (residency_.host_.free_blocks() > 0 || host_freed_) return true;
        if (any_host_copy([&](NodeId copied) {
                return !clean.contains(copied) && !gone_.contains(copied) && !is_deferred(copied);
            })) {
            return true;
        }
        const auto is_leaf = [this](NodeId node) {
            const bool is_held = tree_[node].holds > 0 && !std::ranges::count(unheld_, node);
            return tree_[node].pins == 0 && !is_held && !has_child(node);
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
    const std::uint32_t share_;
    const std::uint32_t served_before_;
    std::int64_t reserved_change_ = 0;  // of the reserved blocks of the share
    NodeId blocked_ = kNone;            // the node that stopped can_make_room()
    // Blocks that have other places in the queue than before: at the end of the part of a rank.
    std::multimap<std::pair<Rank, Side>, NodeId> moved_;
    std::unordered_set<NodeId> path_;
    std::unordered_set<NodeId> gone_;
    std::unordered_set<NodeId> deferred_;
    std::unordered_set<NodeId> returned_;   // deferred before, or given up
    std::unordered_set<NodeId> displaced_;  // reserved before, and not of the path
    std::unordered_set<NodeId> droppable_;
    std::unordered_map<NodeId, std::pair<std::uint32_t, std::uint32_t>>
        gone_children_;  // by parent: children evicted, and children dropped
};

}  // namespace aiokv
