// When blocks get their host copy, and which host copies make room for others.
//
// A *dirty* block is on the device only; a *clean* one has a host copy too, so that its device copy
// can go without a copy being made. A clean block's host copy is its *twin*: giving it up loses
// nothing that is not on the device.
#include <algorithm>

#include "aiokv/core.hpp"

namespace aiokv {

// The lease that computed the block is its first use.
void Core::count_use(NodeId node) {
    Node& n = tree_[node];
    if (n.uses < 255) ++n.uses;
    n.clear(kBackupFailed);  // a used block gets another chance
    if (config_.write_policy == WritePolicy::kWriteThrough ||
        (config_.write_policy == WritePolicy::kWriteThroughSelective &&
         n.uses >= config_.write_through_threshold)) {
        queue_backup(node);
    }
}

void Core::queue_backup(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kHostValid | kHostLoading | kBackupQueued | kBackupFailed)) return;
    n.set(kBackupQueued);
    backups_.push_back(node);
}

// One transfer for all that was queued since the last call. What finds no host room is skipped:
// it is tried again when it comes near eviction.
TransferId Core::take_backups() {
    std::vector<NodeId> nodes;
    for (const NodeId node : backups_) {
        Node& n = tree_[node];
        if (!n.has(kBackupQueued)) continue;
        n.clear(kBackupQueued);
        if (n.has(kDeviceValid) && !n.has(kHostValid | kHostLoading)) nodes.push_back(node);
    }
    backups_.clear();
    while (host_.free_blocks() < nodes.size() && evict_one_host()) {
    }
    return start_offload(std::move(nodes));
}

bool Core::wants_backups() const {
    return !backups_.empty() || wants_write_backs();
}

bool Core::wants_write_backs() const {
    return config_.write_policy != WritePolicy::kNone && host_.capacity() > 0 &&
           device_.free_blocks() + clean_ahead_ < config_.low_watermark_blocks;
}

// Save the blocks that will be evicted next, oldest first, until `wanted_blocks` (or the low
// watermark) are free, clean or being saved. They stay matchable on the device meanwhile: a match
// rescues them at no cost. When no request waits, the walk goes on where the last one ended.
TransferId Core::take_write_backs(std::uint32_t wanted_blocks) {
    if (config_.write_policy == WritePolicy::kNone || host_.capacity() == 0) return 0;
    const std::uint32_t target = std::max(wanted_blocks, config_.low_watermark_blocks);
    if (wanted_blocks > 0) forget_ahead();
    std::vector<NodeId> dirty;
    const std::uint32_t free = device_.free_blocks();
    NodeId node = ahead_last_ == kNone ? device_queue_.front() : device_queue_.after(ahead_last_);
    for (; node != kNone && free + clean_ahead_ < target; node = device_queue_.after(node)) {
        Node& n = tree_[node];
        if (!can_go(n)) dirty.push_back(node);
        n.set(kAhead);
        ++clean_ahead_;
        ahead_last_ = node;
    }
    make_host_room(dirty.size(), target - std::min(target, free));
    // No host room for all: the oldest, which lie below the others, are not saved. When a request
    // waits for device ids, they may be dropped, or the request would wait without end.
    const std::size_t room = host_.free_blocks();
    if (dirty.size() > room) {
        if (wanted_blocks == 0) forget_ahead();
        const auto kept = dirty.end() - static_cast<std::ptrdiff_t>(room);
        for (auto lost = dirty.begin(); wanted_blocks > 0 && lost != kept; ++lost) {
            tree_[*lost].set(kBackupFailed);
            ++counters_.skipped_backups;
        }
        dirty.erase(dirty.begin(), kept);
    }
    return start_offload(std::move(dirty));
}

bool Core::must_look_further() const {
    return stopped_at_unsaved_ && !is_saving();
}

bool Core::is_saving() const {
    return std::any_of(transfers_.begin(), transfers_.end(), [](const auto& entry) {
        return entry.second.direction == Direction::kOffload;
    });
}

// The next walk begins at the front.
void Core::forget_ahead() {
    ahead_last_ = kNone;
    clean_ahead_ = 0;
}

// The node leaves the device queue.
void Core::leave_ahead(NodeId node) {
    if (tree_[node].has(kAhead)) clean_ahead_ -= clean_ahead_ > 0;
    if (node != ahead_last_) return;
    ahead_last_ = device_queue_.before(node);
    if (ahead_last_ == kNone) clean_ahead_ = 0;
}

// Offload as many of the nodes as the host has room for, then the tail, whose host ids the caller
// has taken.
TransferId Core::start_offload(std::vector<NodeId> nodes, std::span<const BlockId> tail_device,
                               std::span<const BlockId> tail_host) {
    if (nodes.size() > host_.free_blocks()) {
        counters_.skipped_backups += nodes.size() - host_.free_blocks();
        nodes.resize(host_.free_blocks());
    }
    if (nodes.empty() && tail_device.empty()) return 0;
    const TransferId transfer_id = ++last_transfer_;
    Transfer& transfer = transfers_[transfer_id];
    transfer.direction = Direction::kOffload;
    transfer.host_blocks.resize(nodes.size());
    host_.take(transfer.host_blocks);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        Node& n = tree_[nodes[i]];
        n.host = transfer.host_blocks[i];
        n.set(kHostLoading);
        ++n.pins;
        transfer.device_blocks.push_back(n.device);
    }
    transfer.nodes = std::move(nodes);
    transfer.device_blocks.insert(transfer.device_blocks.end(), tail_device.begin(),
                                  tail_device.end());
    transfer.host_blocks.insert(transfer.host_blocks.end(), tail_host.begin(), tail_host.end());
    for (const BlockId id : transfer.device_blocks) {
        transfer.after_step = std::max(transfer.after_step, device_.after_step(id));
    }
    return transfer_id;
}

void Core::note_twin(NodeId node) {
    const Node& n = tree_[node];
    if (!n.has(kDetached) && n.has(kHostValid) && n.has(kDeviceValid) && n.holds == 0) {
        twins_.add(n.host, node);
    }
}

// Evicts until `blocks` host ids are free, as far as possible. The newest twin goes first: its
// device copy is the last that will be evicted. The twins of the next `near_blocks` of the device
// queue stay, for their device copies go next.
void Core::make_host_room(std::size_t blocks, std::uint32_t near_blocks) {
    const auto give_up_twins = [&](auto stays) {
        BlockId host = twins_.newest();
        while (host != kNoBlock && host_.free_blocks() < blocks) {
            const BlockId older = twins_.older(host);
            if (!stays(twins_.node_of(host))) give_up_twin(host);
            host = older;
        }
    };
    // Nodes with kAhead are near the front, or were in the last walk; others are not.
    give_up_twins([&](NodeId node) { return near_blocks > 0 && tree_[node].has(kAhead); });
    if (host_.free_blocks() < blocks && !twins_.empty()) {
        std::vector<NodeId> near;
        for (NodeId node = device_queue_.front(); node != kNone && near.size() < near_blocks;
             node = device_queue_.after(node)) {
            near.push_back(node);
        }
        std::sort(near.begin(), near.end());
        give_up_twins(
            [&](NodeId node) { return std::binary_search(near.begin(), near.end(), node); });
    }
    while (host_.free_blocks() < blocks && evict_one_host()) {
    }
}

void Core::give_up_twin(BlockId host) {
    Node& n = tree_[twins_.node_of(host)];
    twins_.remove(host);
    host_.give_back(host);
    n.host = kNoBlock;
    n.clear(kHostValid);
    if (n.has(kAhead)) forget_ahead();
    ++counters_.reclaimed_twins;
}

// Evicting the node now would lose a block that the policy promised to keep.
bool Core::must_save(NodeId node) const {
    if (config_.write_policy != WritePolicy::kWriteBack) return false;
    const Node& n = tree_[node];
    if (n.has(kHostValid | kBackupFailed)) return false;
    return host_.free_blocks() > 0 || !twins_.empty() || host_queue_.size() > 0;
}

}  // namespace aiokv
