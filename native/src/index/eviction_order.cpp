#include "aiokv/eviction_order.hpp"

#include <algorithm>

#include "report.hpp"

namespace aiokv {
namespace {

// The host evicts what leaves both tiers, so it decides like one tier of their sum.
std::uint32_t capacity_of_host_order(const CoreConfig& config) {
    return config.host_blocks + (config.foreign_device ? 0 : config.device_blocks);
}

std::optional<ReuseModel> model_of(const CoreConfig& config) {
    if (config.eviction == EvictionKind::kLru) return std::nullopt;
    return ReuseModel(config.block_tokens, capacity_of_host_order(config));
}

}  // namespace

EvictionOrder::EvictionOrder(const CoreConfig& config, PrefixTree& tree)
    : tree_(tree),
      host_blocks_(config.host_blocks),
      model_(model_of(config)),
      device_(tree, model_ ? &*model_ : nullptr),
      host_(tree, model_ ? &*model_ : nullptr),
      ahead_(tree, device_) {
    if (!model_) return;
    device_dueling_.emplace(*model_, config.device_blocks);
    if (config.host_blocks > 0) host_dueling_.emplace(*model_, capacity_of_host_order(config));
}

std::size_t EvictionOrder::bytes() const {
    return (model_ ? model_->bytes() : 0) + device_.bytes() + host_.bytes() +
           (device_dueling_ ? device_dueling_->bytes() : 0) +
           (host_dueling_ ? host_dueling_->bytes() : 0) +
           unsaved_parked_.capacity() * sizeof(NodeId);
}

EvictionQueue<PrefixTree>& EvictionOrder::queue_of(NodeId node) {
    return tree_[node].has(kDeviceValid) ? device_ : host_;
}

void EvictionOrder::enqueue(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kDeviceLoading)) return;  // its transfer enqueues it
    if (n.has(kDeviceValid)) {
        device_.push_back(node);
    } else {
        host_.push_back(node);
        count_idle_host(n, +1);
    }
    n.set(kQueued);
}

// Called with each change of kQueued | kParked or of holds.
void EvictionOrder::count_idle_host(const Node& n, int change) {
    if (n.has(kDeviceValid) || n.holds > 0) return;
    idle_host_ += static_cast<std::uint32_t>(change);
}

void EvictionOrder::dequeue(NodeId node) {
    Node& n = tree_[node];
    if (!n.has(kQueued | kParked)) return;
    if (!n.has(kDeviceValid)) {
        count_idle_host(n, -1);
        if (n.has(kQueued)) host_.remove(node);
    } else if (n.has(kParked)) {
        --deferred_device_;
    } else {
        ahead_.remove(node);
        device_.remove(node);
    }
    n.clear(kQueued | kParked | kAhead);
}

void EvictionOrder::defer(NodeId node) {
    dequeue(node);
    Node& n = tree_[node];
    n.set(kParked);
    count_idle_host(n, +1);
    if (!n.has(kDeviceValid)) return;
    ++deferred_device_;
    if (is_saved(n) || n.has(kUnsavedParked)) return;
    n.set(kUnsavedParked);
    unsaved_parked_.push_back(node);
    if (unsaved_parked_.size() > most_unsaved_parked()) trim_unsaved_parked();
}

bool EvictionOrder::is_parked_unsaved(NodeId node) const {
    const Node& n = tree_[node];
    return n.has(kParked) && n.has(kDeviceValid) && !is_saved(n);
}

void EvictionOrder::trim_unsaved_parked() {
    // The flag goes with the first entry of a node; another one is that of a node freed since then.
    std::erase_if(unsaved_parked_, [this](NodeId node) {
        Node& n = tree_[node];
        if (!n.has(kUnsavedParked)) return true;
        n.clear(kUnsavedParked);
        return !is_parked_unsaved(node);
    });
    for (const NodeId node : unsaved_parked_) tree_[node].set(kUnsavedParked);
}

void EvictionOrder::requeue_if_free(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kParked) || n.pins > 0) return;
    if (n.has(kDeviceValid) ? tree_.has_device_child(node) : n.child != kNone || n.holds > 0) {
        return;
    }
    dequeue(node);
    queue_of(node).push_front(node);
    tree_[node].set(kQueued);
    count_idle_host(n, +1);
    if (!n.has(kDeviceValid) || !ahead_.is_begun()) return;
    if (!is_saved(n)) return ahead_.restart();  // it is in front of them now
    ahead_.add_front(node);
}

void EvictionOrder::touch(std::span<const NodeId> path) {
    for (std::size_t i = path.size(); i-- > 0;) {
        if (!tree_[path[i]].has(kQueued | kParked)) continue;
        dequeue(path[i]);
        enqueue(path[i]);
    }
}

void EvictionOrder::begin_hold(NodeId node) {
    const Node& n = tree_[node];
    if (n.has(kQueued | kParked)) count_idle_host(n, -1);
}

void EvictionOrder::end_hold(NodeId node) {
    const Node& n = tree_[node];
    if (n.has(kQueued | kParked)) count_idle_host(n, +1);
}

void EvictionOrder::classify(Lease& lease, std::uint64_t seed) {
    if (!model_) return;
    if (lease.classes.empty()) {
        model_->observe(lease.tokens, seed, lease.classes);
        device_dueling_->observe(lease.classes);
        if (device_.choose(device_dueling_->prefers_score())) ahead_.restart();
        if (host_dueling_) {
            host_dueling_->observe(lease.classes);
            host_.choose(host_dueling_->prefers_score());
        }
    }
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        tree_[lease.path[i]].reuse_class = model_->class_at(lease.classes, i);
    }
}

void EvictionOrder::check(Report& report) const {
    std::uint32_t queued_device = 0;
    std::uint32_t queued_host = 0;
    std::uint32_t deferred_device = 0;
    std::uint32_t idle_host = 0;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot)) continue;
        const bool listed = n.has(kQueued | kParked);
        idle_host += listed && !n.has(kDeviceValid) && n.holds == 0;
        queued_device += n.has(kQueued) && n.has(kDeviceValid);
        queued_host += n.has(kQueued) && !n.has(kDeviceValid);
        deferred_device += n.has(kParked) && n.has(kDeviceValid);
        const bool idle = n.refs == 0 && !n.has(kDeviceLoading | kDetached);
        report.require(idle == listed, "I6: node ", node, " with ", n.refs + 0, " refs is ",
                       listed ? "" : "not ", "evictable");
    }
    report.require(queued_device == device_.size() && queued_host == host_.size() &&
                       deferred_device == deferred_device_,
                   "I6: the eviction queues miscount");
    report.require(idle_host == idle_host_, "I6: ", idle_host, " host blocks can go, not ",
                   idle_host_);
}

}  // namespace aiokv
