#include "aiokv/evictable_blocks.hpp"

#include <algorithm>
#include <utility>

#include "report.hpp"

namespace aiokv {
EvictableBlocks::EvictableBlocks(const CoreConfig& config, PrefixTree& tree)
    : tree_(tree),
      order_(make_eviction_order(config, tree)),
      device_(tree, levels_, order_->device(), config.shares, config.device_blocks),
      host_(tree, levels_, order_->host(), config.shares, config.host_blocks),
      ahead_(tree, device_),
      has_host_(config.host_blocks > 0),
      has_classes_(order_->has_classes()) {
    tree_.listen(*this);
}

std::size_t EvictableBlocks::bytes() const {
    return order_->bytes() + unsaved_parked_.capacity() * sizeof(NodeId);
}

// Returns the number of blocks of a run that only the host has and no swapped lease holds.
std::uint32_t EvictableBlocks::count_idle_host(RunId id) const {
    if (is_on_device(id)) return 0;
    const Run& run = tree_.runs()[id];
    std::uint32_t idle = 0;
    for (NodeId node = run.first; node <= run.last(); ++node) idle += tree_[node].holds == 0;
    return idle;
}

void EvictableBlocks::on_split(RunId split, RunId made, bool made_is_above) {
    PreferredQueue& queue = queue_of(split);
    made_is_above ? queue.insert_after(made, split) : queue.insert_before(made, split);
}

// Puts a run at the end of its part of a queue. With `joins`, and if the run before it there is the
// continuation of its blocks, both become one run.
inline void EvictableBlocks::append(PreferredQueue& queue, RunId id, bool joins) {
    Run& run = tree_.runs()[id];
    queue.push_back(id);
    run.set(kQueued);  // not before the queue has read the level, which is in the same word
    if (queue.has_parts()) note_place(queue, id);
    const std::uint32_t share = run.share;
    // Most end at a fork, or at a leaf.
    if (joins && run.child == run.last() + 1) join_below(queue, id);
    if (share > 0) fit_share(queue, share);
}

void EvictableBlocks::join_below(PreferredQueue& queue, RunId id) {
    const RunId below = queue.before(id);
    if (below == kNoRun || !tree_.continues(id, below)) return;
    const bool keeps_below = tree_.runs()[below].length >= tree_.runs()[id].length;
    const RunId gone = keeps_below ? id : below;
    const std::uint32_t blocks = tree_.runs()[gone].length;
    queue.remove(gone);
    tree_.join(id, below, keeps_below ? below : id);
    queue.grow(keeps_below ? below : id, blocks);
}

// Lets the least recently used blocks that a salt has beyond its share compete with all others.
void EvictableBlocks::fit_share(PreferredQueue& queue, std::uint32_t share) {
    for (std::uint32_t excess; (excess = queue.excess_of(share)) > 0;) {
        RunId id = queue.first_reserved(share);
        if (id == kNoRun) return;  // the share has become smaller than what is deferred
        const Run& run = tree_.runs()[id];
        if (run.length > excess) id = tree_.split_before(run.last() - excess + 1);
        ahead_.remove(id);
        queue.end_reservation(id);
        if (queue.has_parts()) note_place(queue, id);
    }
}

// Call when a run has entered a queue with parts. What is evicted before the last block that was
// looked at is to be looked at, too.
void EvictableBlocks::note_place(const PreferredQueue& queue, RunId id) {
    if (&queue != &device_ || !ahead_.is_begun()) return;
    if (queue.rank_of(id) < queue.rank_of(tree_.run_of(ahead_.last()))) ahead_.restart();
}

// -- levels ----------------------------------------------------------------------------------

void EvictableBlocks::set_level(RunId id, Level level) {
    end_touch();
    const bool is_listed = tree_.runs()[id].has(kQueued | kParked);
    take_out(id);
    tree_.runs()[id].level = level & kMaxLevel;
    if (is_listed) push(id);
}

void EvictableBlocks::retain(std::span<const NodeId> path, std::uint32_t priority,
                             std::uint64_t end) {
    const Level level = levels_.open(priority, end);
    tree_.for_each_run_upwards(path, [&](RunId id, auto) {
        const Level before = tree_.runs()[id].level;
        if (levels_.rank(before) < levels_.rank(level)) set_level(id, level);
    });
}

void EvictableBlocks::demote(std::span<const NodeId> path) {
    tree_.for_each_run_upwards(path, [this](RunId id, auto) { demote(id); });
}

void EvictableBlocks::end_retentions(std::uint64_t now) {
    end_touch();
    const std::vector<Levels::Rank> ended = levels_.end(now);
    for (const Levels::Rank rank : ended) {
        device_.end_level(rank);
        host_.end_level(rank);
    }
    if (!ended.empty()) ahead_.restart();
    if (!levels_.should_recycle()) return;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (!tree_.is_live(node)) continue;
        Run& run = tree_.run(node);
        if (levels_.rank(run.level) == Levels::kNormal) run.level = kNormalLevel;
    }
    levels_.recycle();
}

// -- runs ------------------------------------------------------------------------------------

void EvictableBlocks::push(RunId id, bool joins) {
    const Run& run = tree_.runs()[id];
    if (is_on_device(id)) {
        queued_device_ += run.length;
        append(device_, id, joins);
    } else {
        queued_host_ += run.length;
        idle_host_ += count_idle_host(id);
        append(host_, id, joins);
    }
}

void EvictableBlocks::enqueue(RunId id) {
    end_touch();
    if (tree_.runs()[id].has(kOnDevice)) return push(id);
    constexpr std::uint32_t kLoading = kDeviceLoading;
    constexpr std::uint32_t kValid = kDeviceValid;
    const auto kind_of = [this](NodeId node) {
        const Node& n = tree_[node];
        return n.has(kDeviceLoading) ? kLoading : n.flags & kValid;
    };
    const NodeId first = tree_.runs()[id].first;
    for (NodeId end = tree_.runs()[id].last() + 1; end > first;) {
        NodeId from = end - 1;
        const std::uint32_t kind = kind_of(from);
        while (from > first && kind_of(from - 1) == kind) --from;
        const RunId part = tree_.split_before(from);
        if (kind == kValid) tree_.runs()[part].set(kOnDevice);
        if (kind != kLoading) push(part);
        end = from;
    }
}

void EvictableBlocks::take_out(RunId id) {
    Run& run = tree_.runs()[id];
    if (!run.has(kQueued | kParked)) return;
    const bool is_device = is_on_device(id);
    if (!is_device) idle_host_ -= count_idle_host(id);
    if (run.has(kQueued)) {
        ahead_.remove(id);
        (is_device ? device_ : host_).remove(id);
        (is_device ? queued_device_ : queued_host_) -= run.length;
    } else {
        (is_device ? device_ : host_).end_deferral(id);
        if (is_device) deferred_device_ -= run.length;
    }
    run.clear(kQueued | kParked);
}

void EvictableBlocks::trim(RunId id, std::uint32_t count) {
    end_touch();
    queued_of(id) -= count;
    if (!is_on_device(id)) idle_host_ -= count;
    if (count == tree_.runs()[id].length) {
        queue_of(id).remove(id);
    } else {
        queue_of(id).shrink(id, count);
    }
    tree_.trim(id, count);
}

void EvictableBlocks::clear() {
    touched_ = kNone;
    device_.clear();
    host_.clear();
    ahead_.restart();
    unsaved_parked_.clear();
    queued_device_ = queued_host_ = deferred_device_ = idle_host_ = 0;
}

void EvictableBlocks::defer(RunId id) {
    Run& run = tree_.runs()[id];
    ahead_.remove(id);
    queue_of(id).defer(id);
    queued_of(id) -= run.length;
    run.clear(kQueued);
    run.set(kParked);
    if (!is_on_device(id)) return;
    deferred_device_ += run.length;
    if (!has_host_) return;
    for (NodeId node = run.last() + 1; node-- > run.first;) {
        Node& n = tree_[node];
        if (is_saved(n) || n.has(kUnsavedParked)) continue;
        n.set(kUnsavedParked);
        unsaved_parked_.push_back(node);
    }
    if (unsaved_parked_.size() > most_unsaved_parked()) trim_unsaved_parked();
}

bool EvictableBlocks::is_parked_unsaved(NodeId node) const {
    const Node& n = tree_[node];
    return tree_.is_live(node) && tree_.run(node).has(kParked) && n.has(kDeviceValid) &&
           !is_saved(n);
}

void EvictableBlocks::trim_unsaved_parked() {
    // A node may have several entries, if it was freed and used again. The first one clears the
    // flag, so that the others are erased.
    std::erase_if(unsaved_parked_, [this](NodeId node) {
        Node& n = tree_[node];
        if (!n.has(kUnsavedParked)) return true;
        n.clear(kUnsavedParked);
        return !is_parked_unsaved(node);
    });
    for (const NodeId node : unsaved_parked_) tree_[node].set(kUnsavedParked);
}

void EvictableBlocks::requeue_if_free(NodeId node) {
    end_touch();
    const Node& n = tree_[node];
    if (!tree_.run(node).has(kParked) || n.pins > 0) return;
    const bool on_device = n.has(kDeviceValid);
    if (on_device ? tree_.has_device_child(node) : tree_.has_child(node) || n.holds > 0) return;
    // Without a host tier, the blocks above in the run are evicted right after this one.
    const RunId id = has_host_ ? tree_.isolate(node) : tree_.split_after(node);
    Run& run = tree_.runs()[id];
    run.clear(kParked);
    run.set(kQueued);
    if (on_device) deferred_device_ -= run.length;
    queued_of(id) += run.length;
    queue_of(id).push_front(id);
    if (!on_device || !ahead_.is_begun()) return;
    if (!is_saved(n) || device_.has_parts())
        return ahead_.restart();  // blocks looked at are behind this one now
    ahead_.add_front(node);
}

void EvictableBlocks::touch(std::span<const NodeId> path) {
    end_touch();
    if (path.empty()) return;
    touched_ = path.back();
    const Run& run = tree_.run(touched_);
    if (run.has(kQueued | kParked) && run.last() != touched_) tree_.split_after(touched_);
    // A run that enters a share may divide another one.
    if (has_host_ || device_.has_parts() || run.share > 0) end_touch();
}

// Callers of what follows may hold ids of runs, so no run is divided or joined here.
void EvictableBlocks::move_touched() {
    for (NodeId node = std::exchange(touched_, kNone); node != kNone;) {
        const RunId id = tree_.run_of(node);
        node = tree_.runs()[id].parent;
        if (!tree_.runs()[id].has(kQueued | kParked)) continue;
        use(id);
        push(id, false);
    }
}

void EvictableBlocks::classify(const Lease& lease, std::size_t first,
                               std::span<const NodeId> nodes) {
    if (!has_classes_) return;
    for (std::size_t block = first; !nodes.empty();) {
        const ReuseClass reuse_class = lease.class_of(block);
        std::size_t end = lease.end_of_class(block);
        while (end - block < nodes.size() && lease.class_of(end) == reuse_class) {
            end = lease.end_of_class(end);
        }
        const auto part = nodes.first(std::min(nodes.size(), end - block));
        tree_.classify(part, reuse_class);
        nodes = nodes.subspan(part.size());
        block = end;
    }
}

void EvictableBlocks::begin_hold(NodeId node) {
    if (is_listed(node) && !tree_[node].has(kDeviceValid)) --idle_host_;
}

void EvictableBlocks::end_hold(NodeId node) {
    if (is_listed(node) && !tree_[node].has(kDeviceValid)) ++idle_host_;
}

void EvictableBlocks::check(Report& report) const {
    std::uint32_t queued_device = 0;
    std::uint32_t queued_host = 0;
    std::uint32_t deferred_device = 0;
    std::uint32_t idle_host = 0;
    std::vector<std::uint32_t> reserved_device(device_.num_shares());
    std::vector<std::uint32_t> reserved_host(reserved_device);
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot)) continue;
        const Run& run = tree_.run(node);
        const bool listed = is_listed(node);
        idle_host += listed && !n.has(kDeviceValid) && n.holds == 0;
        queued_device += run.has(kQueued) && n.has(kDeviceValid);
        queued_host += run.has(kQueued) && !n.has(kDeviceValid);
        deferred_device += run.has(kParked) && n.has(kDeviceValid);
        if (run.has(kReserved)) {
            ++(n.has(kDeviceValid) ? reserved_device : reserved_host)[run.share - 1];
        }
        const bool idle = run.refs == 0 && !n.has(kDeviceLoading | kDetached);
        report.require(idle == listed, "I6: node ", node, " with ", run.refs, " refs is ",
                       listed ? "" : "not ", "evictable");
        report.require(!n.has(kAhead) || run.has(kMayBeAhead), "I6: node ", node,
                       " was looked at, its run was not");
    }
    report.require(queued_device == queued_device_ && queued_host == queued_host_ &&
                       deferred_device == deferred_device_,
                   "I6: the eviction queues miscount");
    device_.check(report, reserved_device);
    host_.check(report, reserved_host);
    report.require(idle_host == idle_host_, "I6: ", idle_host, " host blocks can go, not ",
                   idle_host_);
}

}  // namespace aiokv
