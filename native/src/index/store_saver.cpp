#include "aiokv/store_saver.hpp"

#include <algorithm>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

StoreSaver::StoreSaver(const CoreConfig& config, PrefixTree& tree, const RunPool& host,
                       StoredBlocks& stored, Residency& residency, TransferLedger& transfers)
    : config_(config),
      tree_(tree),
      host_(host),
      stored_(stored),
      residency_(residency),
      transfers_(transfers) {
    if (stored.exist() && config.stores.only_reused) {
        offered_.emplace(2 * (std::uint64_t{config.device_blocks} + config.host_blocks));
    }
}

// -- candidates --------------------------------------------------------------------------------

void StoreSaver::queue(NodeId node) {
    if (!tree_[node].has(kHostValid) || !stored_.is_due(node)) return;
    if (stored_.has(node, kSaveQueued)) return;
    if (queue_.size() >= config_.stores.queue_blocks) {
        ++dropped_;
        return;
    }
    stored_.set(node, kSaveQueued);
    queue_.push_back(node);
}

void StoreSaver::note_host_copies(std::span<const NodeId> nodes) {
    if (!stored_.exist()) return;
    for (const NodeId node : nodes) {
        if (tree_.is_live(node) && !tree_[node].has(kDetached)) queue(node);
    }
}

void StoreSaver::note_uses(const Lease& lease, std::size_t resident) {
    if (!stored_.exist() || !lease.flags.computes) return;
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        Node& n = tree_[lease.path[i]];
        if (i >= resident && n.uses < 255) ++n.uses;
        stored_.clear(lease.path[i], kSaveRefused);
        queue(lease.path[i]);
    }
}

bool StoreSaver::can_save(NodeId node) const {
    return tree_[node].has(kHostValid) && !stored_.has(node, kStored | kSaving | kSaveRefused);
}

// Offered once: a block that is rejected is offered again after its next use.
bool StoreSaver::admit(NodeId node) {
    if (!offered_ || offered_->offer(stored_.digest(node))) return true;
    stored_.set(node, kSaveRefused);
    ++rejected_;
    return false;
}

std::vector<NodeId> StoreSaver::take_queued() {
    std::vector<NodeId> nodes;
    while (!queue_.empty() && nodes.size() < kMaxBlocks) {
        const NodeId node = queue_.front();
        queue_.pop_front();
        if (!tree_.is_live(node) || !stored_.has(node, kSaveQueued)) continue;
        stored_.clear(node, kSaveQueued);
        if (tree_[node].has(kDetached) || !can_save(node) || !admit(node)) continue;
        nodes.push_back(node);
    }
    return nodes;
}

// Host blocks to look at, behind the free ones.
std::uint32_t StoreSaver::ahead_blocks() const {
    const std::uint32_t free = host_.free_blocks();
    return config_.stores.ahead_blocks - std::min(config_.stores.ahead_blocks, free);
}

std::vector<NodeId> StoreSaver::look_ahead() {
    std::vector<NodeId> nodes = residency_.next_on_host(ahead_blocks());
    std::erase_if(nodes, [this](NodeId node) { return !can_save(node) || !admit(node); });
    if (nodes.size() > kMaxBlocks) nodes.resize(kMaxBlocks);
    return nodes;
}

// -- saves -------------------------------------------------------------------------------------

bool StoreSaver::wants_saves() const {
    if (!stored_.exist() || saves_.size() >= kMaxInFlight) return false;
    return config_.stores.policy == StorePolicy::kOnEviction ? ahead_blocks() > 0 : !queue_.empty();
}

TransferId StoreSaver::take() {
    if (!wants_saves()) return 0;
    Save save;
    save.nodes = config_.stores.policy == StorePolicy::kOnEviction ? look_ahead() : take_queued();
    if (save.nodes.empty()) return 0;
    for (const NodeId node : save.nodes) {
        save.host_blocks.push_back(tree_[node].host);
        save.digests.push_back(stored_.digest(node));
    }
    residency_.begin_save(save.nodes);
    const TransferId id = transfers_.begin_store_transfer();
    saves_.emplace(id, std::move(save));
    return id;
}

void StoreSaver::complete(TransferId id, Outcome outcome, std::span<const std::uint8_t> results) {
    const std::size_t blocks = saves_.at(id).nodes.size();
    if (!results.empty() && results.size() != blocks) {
        throw UsageError("complete: the report of a save of " + str(blocks) + " blocks has " +
                         str(results.size()) + " results");
    }
    const Save save = std::move(saves_.extract(id).mapped());
    const SaveResult all = outcome == Outcome::kDone ? SaveResult::kDone : SaveResult::kFailed;
    for (std::size_t i = 0; i < blocks; ++i) {
        const auto result = results.empty() ? all : static_cast<SaveResult>(results[i]);
        const bool is_done = result == SaveResult::kDone;
        stored_.set(save.nodes[i], is_done ? kStored : kSaveRefused);
        saved_ += is_done;
        refused_ += result == SaveResult::kRefused;
        failed_ += !is_done && result != SaveResult::kRefused;
    }
    residency_.finish_save(save.nodes);
    transfers_.end_store_transfer();
}

void StoreSaver::add_to(CoreStatistics& statistics) const {
    statistics.saved_blocks = saved_;
    statistics.dropped_saves = dropped_ + residency_.evicted_unsaved();
    statistics.rejected_saves = rejected_;
    statistics.refused_saves = refused_;
    statistics.failed_saves = failed_;
}

void StoreSaver::check(Report& report) const {
    std::size_t saving = 0;
    for (const auto& [id, save] : saves_) {
        saving += save.nodes.size();
        for (std::size_t i = 0; i < save.nodes.size(); ++i) {
            const NodeId node = save.nodes[i];
            ++report.holds[node];
            report.require(tree_.is_live(node) && tree_[node].host == save.host_blocks[i],
                           "I3: save ", id, " block ", i, " changed under way");
            report.require(stored_.has(node, kSaving), "I3: save ", id, " block ", i,
                           " is not known to be read");
        }
    }
    std::size_t flagged = 0;
    std::size_t queued = 0;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (!tree_.is_live(node)) continue;
        flagged += stored_.has(node, kSaving);
        queued += stored_.has(node, kSaveQueued) && !tree_[node].has(kDetached);
    }
    report.require(flagged == saving, "I3: saves read ", saving, " blocks, ", flagged,
                   " are known to be read");
    report.require(queued <= queue_.size() && queue_.size() <= config_.stores.queue_blocks,
                   "I6: ", queued, " blocks wait for a save, ", queue_.size(), " are queued");
}

}  // namespace aiokv
