#include "aiokv/host_snapshots.hpp"

#include <algorithm>
#include <unordered_map>

#include "report.hpp"

namespace aiokv {

HostSnapshots::HostSnapshots(const CoreConfig& config, Index& index, AuxiliaryPool& device,
                             TransferLedger& transfers, StoredBlocks& stored, Residency& residency)
    : config_(config),
      index_(index),
      device_(device),
      transfers_(transfers),
      pool_(config.host_state_slots, 1),
      being_saved_(config.state_slots, false) {
    if (stored.exist()) {
        stores_.emplace(config, index, stored, residency, transfers, device, pool_);
    }
}

void HostSnapshots::finish_read(BlockId slot, bool failed) {
    if (failed && pool_.is_attached(slot)) {
        pool_.forget(pool_.node_of(slot));
        index_.change();
    }
    pool_.remove_reader(slot);
}

bool HostSnapshots::is_used_enough(NodeId node) const {
    if (config_.write_policy == WritePolicy::kWriteThrough) return true;
    return config_.write_policy == WritePolicy::kWriteThroughSelective &&
           index_.tree()[node].uses >= config_.write_through_threshold;
}

bool HostSnapshots::is_unsaved(BlockId device_slot) const {
    return device_.is_attached(device_slot) &&
           !being_saved_[static_cast<std::size_t>(device_slot)] &&
           pool_.find(device_.node_of(device_slot)) == kNoBlock;
}

void HostSnapshots::note_use(BlockId device_slot) {
    if (is_used_enough(device_.node_of(device_slot))) queue(device_slot);
    note_taken();
}

void HostSnapshots::queue(BlockId device_slot) {
    if (!is_unsaved(device_slot)) return;
    if (std::find(queue_.begin(), queue_.end(), device_slot) != queue_.end()) return;
    queue_.push_back(device_slot);
}

// An eighth of the device slots is kept free or saved ahead of eviction, and at least two: a slot
// of the next lease, and one of its snapshot.
void HostSnapshots::queue_next_evicted() {
    looks_ahead_ = false;
    const std::uint32_t target = std::max<std::uint32_t>(device_.capacity() / 8, 2);
    std::uint32_t ready = device_.free_ids();
    for (BlockId slot = device_.first_evicted(); slot != kNoBlock && ready < target; ++ready) {
        queue(slot);
        slot = device_.evicted_after(slot);
    }
}

// The first queued slot whose snapshot can be copied now; kNoBlock: none.
BlockId HostSnapshots::take_queued() {
    std::erase_if(queue_, [this](BlockId slot) { return !is_unsaved(slot); });
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [this](BlockId slot) { return device_.is_closed(slot); });
    if (found == queue_.end()) return kNoBlock;
    const BlockId slot = *found;
    queue_.erase(found);
    return slot;
}

TransferId HostSnapshots::take_save() {
    if (looks_ahead_) queue_next_evicted();
    if (pool_.room() == 0) return 0;
    const BlockId source = take_queued();
    if (source == kNoBlock) return 0;
    StateMove save;
    save.route = StateRoute::kToHost;
    save.source = source;
    if (pool_.take(save.target)) {
        ++evicted_;
        index_.change();
    }
    save.after_step = device_.after_step(source);
    device_.add_reader(source);
    being_saved_[static_cast<std::size_t>(source)] = true;
    return transfers_.begin_move(save);
}

// The snapshot is the node's own as long as the save reads it, and only one save does.
void HostSnapshots::finish_save(const StateMove& save, bool copied) {
    const NodeId node = device_.node_of(save.source);
    being_saved_[static_cast<std::size_t>(save.source)] = false;
    device_.remove_copier(save.source);
    if (!copied || node == kNone || pool_.find(node) != kNoBlock) {
        return pool_.give_back(save.target, 0);
    }
    pool_.attach(node, save.target);
    if (stores_) stores_->note_copy(save.target);
    ++saved_;
}

void HostSnapshots::add_to(CoreStatistics& statistics) const {
    statistics.host_state_free = pool_.free_ids();
    statistics.host_state_snapshots = pool_.attached();
    statistics.saved_snapshots = saved_;
    statistics.evicted_host_snapshots = evicted_;
    if (stores_) stores_->add_to(statistics);
}

void HostSnapshots::check(Report& report, const LeaseTable& leases) const {
    Ownership slots = report.pool("host state", pool_.capacity());
    std::unordered_map<BlockId, std::uint32_t> readers;
    if (stores_) {
        for (const BlockId slot : stores_->read_ids()) ++readers[slot];
        for (const BlockId slot : stores_->owned_ids()) slots.own(slot, "a fetch");
        stores_->check(report);
    }
    for (const Lease& lease : leases) {
        const BlockId held = lease.recurrent.read_host_snapshot;
        if (held != kNoBlock) ++readers[held];
    }
    std::size_t saves = 0;
    for (const auto& [id, move] : transfers_.moves()) {
        if (move.route == StateRoute::kFromHost) ++readers[move.source];
        if (move.route != StateRoute::kToHost) continue;
        ++saves;
        slots.own(move.target, "a save");
        report.require(being_saved_[static_cast<std::size_t>(move.source)], "I3: save ", id,
                       " reads a state slot that counts as idle");
    }
    report.require(static_cast<std::size_t>(
                       std::count(being_saved_.begin(), being_saved_.end(), true)) == saves,
                   "I3: state slots count as being saved without a transfer");
    for (BlockId id = 0; static_cast<std::uint32_t>(id) < pool_.capacity(); ++id) {
        const std::uint32_t held = readers.contains(id) ? readers.at(id) : 0;
        const bool is_attached = pool_.is_attached(id);
        if (is_attached || held > 0) slots.own(id, "a snapshot");
        report.require(pool_.readers(id) == held, "I5: host state slot ", id, " counts ",
                       pool_.readers(id), " readers of ", held);
        if (!is_attached) continue;
        const NodeId node = pool_.node_of(id);
        const bool live =
            index_.tree().is_live(node) && !index_.tree()[node].has(kDetached | kRoot);
        report.require(live && index_.tree()[node].has(kHasSides) && pool_.find(node) == id,
                       "I2: the node of host snapshot ", id, " does not know it");
    }
    slots.check([this](BlockId id) { return pool_.is_free(id); });
}

}  // namespace aiokv
