#include "aiokv/saver.hpp"

#include <algorithm>
#include <ranges>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

void Saver::queue(NodeId node) {
    Node& n = tree_[node];
    if (n.has(kHostValid | kHostLoading | kBackupQueued | kBackupFailed)) return;
    n.set(kBackupQueued);
    (n.has(kDeviceValid) && device_.is_ahead(n.device) ? ahead_ : queue_).push_back(node);
}

void Saver::close_step() {
    if (ahead_.empty()) return;
    const auto computed = std::stable_partition(ahead_.begin(), ahead_.end(), [this](NodeId node) {
        const Node& n = tree_[node];
        return n.has(kBackupQueued) && n.has(kDeviceValid) && !device_.is_writable(n.device);
    });
    queue_.insert(queue_.end(), computed, ahead_.end());
    ahead_.erase(computed, ahead_.end());
}

// Removes the first entries of the queue; returns their nodes that have no host copy.
std::vector<NodeId> Saver::take_queued(std::size_t entries) {
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(entries);
    std::vector<NodeId> nodes;
    nodes.reserve(entries);
    // Of several entries of a node, the last one counts: the others are those of blocks that were
    // evicted unsaved.
    for (const NodeId node : std::ranges::subrange(queue_.begin(), end) | std::views::reverse) {
        Node& n = tree_[node];
        if (!n.has(kBackupQueued)) continue;
        n.clear(kBackupQueued);
        if (n.has(kDeviceValid) && !n.has(kHostValid | kHostLoading)) nodes.push_back(node);
    }
    std::ranges::reverse(nodes);
    queue_.erase(queue_.begin(), end);
    return nodes;
}

TransferId Saver::take_backups() {
    while (!queue_.empty()) {
        std::vector<NodeId> nodes = take_queued(std::min(queue_.size(), kMostBackups));
        residency_.fit_early_copies(nodes);
        if (const TransferId id = start_offload(std::move(nodes))) return id;
    }
    return 0;
}

bool Saver::wants_write_backs() const {
    return config_.write_policy != SavePolicy::kNone &&
           device_.free_blocks() + residency_.clean_ahead() < config_.low_watermark_blocks;
}

TransferId Saver::take_write_backs(std::uint32_t wanted_blocks) {
    if (config_.write_policy == SavePolicy::kNone) return 0;
    const std::uint32_t target = std::max(wanted_blocks, config_.low_watermark_blocks);
    if (wanted_blocks > 0) residency_.restart_look_ahead();
    const std::uint32_t free = device_.free_blocks();
    auto [dirty, passed_open_step] = residency_.look_ahead(
        target, wanted_blocks > 0 ? Residency::Unsaved::kDropped : Residency::Unsaved::kKept);
    residency_.make_host_room(dirty.size(), target - std::min(target, free));
    if (passed_open_step) residency_.restart_look_ahead();  // they can be saved later
    // The host has no room for all. The oldest nodes, which are below the others, are not saved. If
    // a request waits for device ids, they may be dropped, because the request would otherwise wait
    // forever.
    const std::size_t room = host_.free_blocks();
    if (dirty.size() > room) {
        if (wanted_blocks == 0) residency_.restart_look_ahead();
        const auto kept = dirty.end() - static_cast<std::ptrdiff_t>(room);
        for (auto lost = dirty.begin(); wanted_blocks > 0 && lost != kept; ++lost) {
            tree_[*lost].set(kBackupFailed);
            ++skipped_;
        }
        dirty.erase(dirty.begin(), kept);
    }
    return start_offload(std::move(dirty));
}

TransferId Saver::start_offload(std::vector<NodeId> nodes, const Tail& tail) {
    if (nodes.empty() && tail.device.empty()) return 0;
    if (nodes.size() > host_.free_blocks()) {
        throw InternalError("save of " + std::to_string(nodes.size()) + " blocks: the host has " +
                            std::to_string(host_.free_blocks()) + " free blocks");
    }
    Transfer transfer;
    transfer.direction = Direction::kOffload;
    transfer.tail_owner = tail.owner;
    transfer.host_blocks.resize(nodes.size());
    host_.take(transfer.host_blocks);
    transfer.device_blocks.reserve(nodes.size() + tail.device.size());
    for (const NodeId node : nodes) transfer.device_blocks.push_back(tree_[node].device);
    transfer.nodes = std::move(nodes);
    residency_.begin_offload(transfer);
    transfer.device_blocks.insert(transfer.device_blocks.end(), tail.device.begin(),
                                  tail.device.end());
    transfer.host_blocks.insert(transfer.host_blocks.end(), tail.host.begin(), tail.host.end());
    transfer.after_step = residency_.after_step(transfer.device_blocks);
    return transfers_.begin(std::move(transfer));
}

void Saver::check(Report& report) const {
    std::size_t flagged = 0;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        flagged += tree_.is_live(node) && tree_[node].has(kBackupQueued);
    }
    std::vector<NodeId> listed(queue_);
    listed.insert(listed.end(), ahead_.begin(), ahead_.end());
    std::sort(listed.begin(), listed.end());
    listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
    const auto queued =
        static_cast<std::size_t>(std::count_if(listed.begin(), listed.end(), [this](NodeId node) {
            return tree_.is_live(node) && tree_[node].has(kBackupQueued);
        }));
    report.require(flagged == queued, "I6: ", flagged, " blocks wait for a backup, ", queued,
                   " are queued");
}

}  // namespace aiokv
