// Forecast of allocate(): would it grant now? Evicts nothing.
//
// The free and evictable blocks are more than a grant can get: a block that a transfer reads, or
// that the write policy saves first, cannot be evicted now, nor can its ancestors. So this walks
// the eviction queue as make_room() does, and notes in sets of its own which blocks would be
// evicted. It costs as much as the attempt.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "aiokv/core.hpp"

namespace aiokv {

class Core::Forecast {
  public:
    // `lease`: its path is final; the grant takes refs on it first.
    Forecast(Core& core, const Lease& lease, bool host_freed)
        : core_(core),
          tree_(core.tree_),
          lease_(lease),
          free_(core.device_.free_blocks()),
          host_freed_(host_freed) {
        path_.insert(lease.path.begin(), lease.path.end());
        const auto on_host = std::count_if(path_.begin(), path_.end(), [this](NodeId node) {
            return tree_[node].has(kQueued) && !tree_[node].has(kDeviceValid);
        });
        host_usable_ = core.host_.free_blocks() > 0 || !core.twins_.empty() || host_freed ||
                       core.host_queue_.size() > static_cast<std::uint32_t>(on_host);
    }

    // Device blocks of the path that count as evictable, until the lease has its refs.
    std::uint32_t evictable_path() const {
        const auto counts = [this](NodeId node) {
            return tree_[node].has(kDeviceValid) && tree_[node].has(kQueued | kParked);
        };
        const auto count = std::count_if(lease_.path.begin(), lease_.path.end(), counts);
        return static_cast<std::uint32_t>(count);
    }

    std::uint32_t free_blocks() const { return free_; }

    // What make_room() would return.
    bool can_make_room(std::uint32_t blocks) {
        NodeId node = core_.device_queue_.front();
        for (; node != kNone && free_ < blocks; node = core_.device_queue_.after(node)) {
            if (is_out_of_queue(node)) continue;
            for (NodeId next = node; next != kNone && free_ < blocks;) {
                blocked_ = attempt(next);
                if (blocked_ != kNone) return false;
            }
        }
        return free_ >= blocks;
    }

    // After can_make_room() was false: take_write_backs() would find nothing to save, because the
    // host has no room at all, and would allow the first blocks in its way to be dropped.
    bool may_drop_unsaved(std::uint32_t wanted_blocks) {
        if (blocked_ == kNone || tree_[blocked_].has(kHostLoading)) return false;
        std::vector<NodeId> dirty;
        std::unordered_set<NodeId> clean;
        const std::uint32_t target = std::max(wanted_blocks, core_.config_.low_watermark_blocks);
        std::uint32_t ready = free_;
        const auto look_at = [&](NodeId node) {
            if (tree_[node].has(kHostValid)) clean.insert(node);
            if (!can_go(tree_[node])) dirty.push_back(node);
            ++ready;
        };
        // A parent whose last child has gone is at the front.
        if (tree_[blocked_].has(kParked) || parked_.contains(blocked_)) look_at(blocked_);
        for (NodeId node = core_.device_queue_.front(); node != kNone && ready < target;
             node = core_.device_queue_.after(node)) {
            if (!is_out_of_queue(node)) look_at(node);
        }
        // The failed attempt has put the path at the end of the queue, its last block first.
        for (std::size_t i = lease_.path.size(); i-- > 0 && ready < target;) {
            const Node& n = tree_[lease_.path[i]];
            if (n.refs == 0 && n.has(kDeviceValid)) look_at(lease_.path[i]);
        }
        if (host_has_room(clean)) return false;
        droppable_.insert(dirty.begin(), dirty.end());
        host_usable_ = any_twin([&](NodeId twin) { return clean.contains(twin); });
        return true;
    }

    // Device ids that would be free and that a transfer may write, as in fit_writable().
    std::uint32_t writable_blocks() const {
        const auto is_writable = [this](NodeId node) {
            return core_.device_.is_writable(tree_[node].device);
        };
        const auto count = std::count_if(gone_.begin(), gone_.end(), is_writable);
        return core_.device_.writable_blocks() + static_cast<std::uint32_t>(count);
    }

    // The grant gives up its path from block `blocks` on.
    void shorten_path(std::size_t blocks) {
        for (std::size_t i = blocks; i < lease_.path.size(); ++i) path_.erase(lease_.path[i]);
    }

  private:
    bool is_out_of_queue(NodeId node) const {
        return gone_.contains(node) || parked_.contains(node) || path_.contains(node);
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

    bool must_save(NodeId node) const {
        if (core_.config_.write_policy != WritePolicy::kWriteBack) return false;
        const bool may_go =
            tree_[node].has(kHostValid | kBackupFailed) || droppable_.contains(node);
        return !may_go && host_usable_;
    }

    // evict_one_device() with `node` at the front; then `node` is what came to the front instead,
    // or kNone for the next of the queue. Returns the node that stops eviction, or kNone.
    NodeId attempt(NodeId& node) {
        const Node& n = tree_[node];
        if (n.pins > 0 || device_children(node) > 0) {
            if (n.has(kHostLoading) && core_.config_.write_policy == WritePolicy::kWriteBack) {
                return node;
            }
            parked_.insert(node);
            node = kNone;
            return kNone;
        }
        if (must_save(node)) return node;
        const bool dropped = !n.has(kHostValid);
        host_freed_ |= dropped && has_child(node);  // the host copies below are dropped too
        host_usable_ |= !dropped || host_freed_;
        ++free_;
        gone_.insert(node);
        parked_.erase(node);
        const NodeId parent = n.parent;
        ++gone_children_[parent].first;
        gone_children_[parent].second += dropped;
        const bool waits = tree_[parent].has(kParked) || parked_.contains(parent);
        const bool is_free = !path_.contains(parent) && tree_[parent].pins == 0 &&
                             tree_[parent].has(kDeviceValid) && device_children(parent) == 0;
        node = waits && is_free ? parent : kNone;
        return kNone;
    }

    // make_host_room() would free a block; the host copies of `clean` stay.
    bool host_has_room(const std::unordered_set<NodeId>& clean) const {
        if (core_.host_.free_blocks() > 0 || host_freed_) return true;
        if (any_twin([&](NodeId twin) { return !clean.contains(twin) && !gone_.contains(twin); })) {
            return true;
        }
        const auto is_leaf = [this](NodeId node) {
            return tree_[node].pins == 0 && tree_[node].holds == 0 && !has_child(node);
        };
        for (NodeId node = core_.host_queue_.front(); node != kNone;
             node = core_.host_queue_.after(node)) {
            if (is_leaf(node)) return true;
        }
        return std::any_of(gone_.begin(), gone_.end(), [&](NodeId node) {
            return tree_[node].has(kHostValid) && is_leaf(node);
        });
    }

    template <class Predicate>
    bool any_twin(Predicate is_wanted) const {
        BlockId host = core_.twins_.newest();
        while (host != kNoBlock && !is_wanted(core_.twins_.node_of(host))) {
            host = core_.twins_.older(host);
        }
        return host != kNoBlock;
    }

    Core& core_;
    const PrefixTree& tree_;
    const Lease& lease_;
    std::uint32_t free_;
    bool host_freed_;         // a drop would have freed host blocks
    bool host_usable_;        // for must_save()
    NodeId blocked_ = kNone;  // what stopped can_make_room()
    std::unordered_set<NodeId> path_;
    std::unordered_set<NodeId> gone_;
    std::unordered_set<NodeId> parked_;
    std::unordered_set<NodeId> droppable_;
    std::unordered_map<NodeId, std::pair<std::uint32_t, std::uint32_t>> gone_children_;  // dropped
};

// make_side_room(), changing nothing. `frees_host`: host blocks of swapped leases would come free.
bool Core::could_make_side_room(const Lease& lease, std::uint32_t total_blocks,
                                bool& frees_host) const {
    if (has_state_room(lease) && has_window_room(lease, total_blocks)) return true;
    if (!moves_.empty() || computing_leases_ > 0) return false;
    bool has_state = has_state_room(lease);
    std::vector<std::uint64_t> reserved;
    for (const WindowGroup& group : windows_) reserved.push_back(group.reserved);
    const auto has_windows = [&] {
        for (std::size_t g = 0; g < windows_.size(); ++g) {
            const std::uint32_t held = lease.windows.empty() ? 0 : lease.windows[g].reserved;
            const std::uint32_t wanted = std::max(reserve_of(windows_[g], total_blocks), held);
            if (reserved[g] - held + wanted > windows_[g].pool.capacity()) return false;
        }
        return true;
    };
    for (const Lease& victim : leases_) {
        if (has_state && has_windows()) break;
        if (!victim.live || !victim.swapped || &victim == &lease) continue;
        if (victim.state_slot == kNoBlock && victim.windows.empty()) continue;
        has_state = has_state || victim.state_slot != kNoBlock || !victim.snapshots.empty();
        for (std::size_t g = 0; g < victim.windows.size(); ++g) {
            reserved[g] -= victim.windows[g].reserved;
        }
        frees_host = frees_host || !victim.tail_host.empty();
        for (std::size_t i = reachable(victim, victim.path.size()); i < victim.path.size(); ++i) {
            const Node& n = tree_[victim.path[i]];
            frees_host = frees_host || (n.holds == 1 && n.refs == 0 && !n.has(kDeviceResident) &&
                                        n.child == kNone);
        }
    }
    return has_state && has_windows();
}

// `saves`: the caller answers a grant in vain with take_write_backs(), and tries once more when
// there is nothing to save.
bool Core::can_allocate(LeaseId id, std::int64_t num_tokens, bool saves) {
    check_request(id, num_tokens);
    Lease& lease = lease_at(id);
    const std::uint32_t total = blocks_for(static_cast<std::uint64_t>(num_tokens));
    if (lease.swapped) {
        trim_swapped(lease);
    } else {
        choose_path(lease, static_cast<std::size_t>(num_tokens) / config_.block_tokens);
    }
    if (lease.swapped && joinable(lease) < lease.path.size()) return false;
    const auto is_resident = [this](NodeId node) { return tree_[node].has(kDeviceResident); };
    const std::uint32_t needed = total - static_cast<std::uint32_t>(std::count_if(
                                             lease.path.begin(), lease.path.end(), is_resident));
    bool frees_host = false;
    if (!could_make_side_room(lease, total, frees_host)) return false;
    Forecast forecast(*this, lease, frees_host);
    const std::uint32_t room = device_.free_blocks() + evictable() - forecast.evictable_path();
    if (needed + reserve_for(total) > room) return false;
    bool has_room = forecast.can_make_room(needed);
    std::uint32_t wanted = total;
    while (saves && !has_room && forecast.may_drop_unsaved(wanted)) {
        const std::uint32_t before = forecast.free_blocks();
        has_room = forecast.can_make_room(needed);
        if (is_saving()) break;
        if (forecast.free_blocks() > before) continue;
        if (wanted >= device_.capacity()) break;
        wanted = std::min(2 * wanted, device_.capacity());
    }
    if (!has_room || lease.swapped) return has_room;
    const std::size_t resident = total - needed;
    const std::size_t blocks = writable_path(lease, resident, forecast.writable_blocks());
    if (blocks >= resident) return true;
    forecast.shorten_path(blocks);
    return forecast.can_make_room(total - static_cast<std::uint32_t>(blocks));
}

}  // namespace aiokv
