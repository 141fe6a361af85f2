#include "aiokv/host_copies.hpp"

#include <algorithm>
#include <utility>

#include "report.hpp"

namespace aiokv {

HostCopies::HostCopies(const CoreConfig& config, Index& index, GroupPool& device,
                       TransferLedger& transfers, std::uint32_t capacity, GroupId group)
    : config_(config),
      index_(index),
      device_(device),
      transfers_(transfers),
      pool_(capacity, device.tail_blocks(), device.head_blocks()),
      group_(group),
      is_queued_(device.capacity(), false),
      being_saved_(device.capacity(), false) {
    device.note_uses();
}

void HostCopies::finish_read(BlockId id, bool failed) {
    if (failed && pool_.is_attached(id)) {
        pool_.forget(pool_.node_of(id));
        index_.change();
    }
    pool_.remove_reader(id);
}

bool HostCopies::is_unsaved(BlockId device_id) const {
    return device_.is_attached(device_id) && !being_saved_[at(device_id)] &&
           pool_.find(device_.node_of(device_id)) == kNoBlock;
}

void HostCopies::note_use(BlockId device_id) {
    if (config_.copies_after(index_.tree()[device_.node_of(device_id)].uses)) queue(device_id);
    note_taken();
}

void HostCopies::queue(BlockId device_id) {
    if (is_queued_[at(device_id)] || !is_unsaved(device_id)) return;
    is_queued_[at(device_id)] = true;
    queue_.push_back(device_id);
}

// Keeps an eighth of the device ids free or saved ahead of eviction, and at least two: the next
// lease needs a state slot and a snapshot.
void HostCopies::queue_next_evicted() {
    looks_ahead_ = false;
    const std::uint32_t target = std::max<std::uint32_t>(device_.capacity() / 8, 2);
    std::uint32_t ready = device_.free_ids();
    for (BlockId id = device_.first_evicted(); id != kNoBlock && ready < target; ++ready) {
        queue(id);
        id = device_.evicted_after(id);
    }
}

// Returns the first queued ids that can be copied now.
std::vector<BlockId> HostCopies::take_queued(std::uint32_t limit) {
    std::vector<BlockId> taken;
    std::erase_if(queue_, [&](BlockId id) {
        const bool takes = is_unsaved(id) && device_.is_closed(id) && taken.size() < limit;
        if (takes) taken.push_back(id);
        const bool stays = is_unsaved(id) && !takes;
        is_queued_[at(id)] = stays;
        return !stays;
    });
    return taken;
}

TransferId HostCopies::take_save(std::uint32_t limit) {
    if (looks_ahead_) queue_next_evicted();
    limit = std::min(limit, pool_.room());
    if (limit == 0) return 0;
    Move save;
    save.route = MoveRoute::kToHost;
    save.group = group_;
    save.sources = take_queued(limit);
    if (save.sources.empty()) return 0;
    for (const BlockId source : save.sources) {
        save.targets.push_back(take());
        save.after_step = std::max(save.after_step, device_.after_step(source));
        device_.add_reader(source);
        being_saved_[at(source)] = true;
    }
    return transfers_.begin_move(std::move(save));
}

BlockId HostCopies::take() {
    BlockId id = kNoBlock;
    if (pool_.take(id)) {
        ++evicted_;
        index_.change();
    }
    return id;
}

void HostCopies::attach(NodeId node, BlockId id) {
    pool_.attach(node, id);
    if (stores_) stores_->note_copy(id);
    ++saved_;
}

// Each source still belongs to its node, because the save reads it, and no other save has it.
void HostCopies::finish_save(const Move& save, std::uint32_t good) {
    for (std::size_t i = 0; i < save.sources.size(); ++i) {
        const NodeId node = device_.node_of(save.sources[i]);
        being_saved_[at(save.sources[i])] = false;
        device_.remove_copier(save.sources[i]);
        if (i >= good || node == kNone || pool_.find(node) != kNoBlock) {
            pool_.give_back(save.targets[i], 0);
            continue;
        }
        attach(node, save.targets[i]);
    }
}

void HostCopies::add_to(GroupStatistics& statistics) const {
    TierCounts& host = statistics.host;
    host.blocks = pool_.capacity();
    host.free = pool_.free_ids();
    host.cached = pool_.attached();
    host.in_flight = host.blocks - host.free - host.cached;
    host.evicted_by_cause["capacity"] = evicted_;
    statistics.offloaded_blocks = saved_;
    if (stores_) stores_->add_to(statistics);
}

void HostCopies::check(Report& report, std::vector<std::uint32_t> readers,
                       std::span<const BlockId> owned) const {
    Ownership ids =
        report.pool(group_ == kRecurrentState ? "host state" : "host window", pool_.capacity());
    for (const BlockId id : owned) ids.own(id, "a save");
    if (stores_) stores_->check(report, ids, readers);
    std::size_t saves = 0;
    for (const auto& [id, move] : transfers_.moves()) {
        if (move.group != group_ || move.route == MoveRoute::kOnDevice) continue;
        if (move.route == MoveRoute::kFromHost) {
            for (const BlockId source : move.sources) ++readers[at(source)];
            continue;
        }
        for (const BlockId target : move.targets) ids.own(target, "a save");
        if (config_.external_device) continue;  // the sources are not ids of a pool
        saves += move.sources.size();
        for (const BlockId source : move.sources) {
            report.require(being_saved_[at(source)], "I3: save ", id, " reads device id ", source,
                           " of the ", ids.tier(), " copies, which counts as idle");
        }
    }
    const auto count = [](const std::vector<bool>& flags) {
        return static_cast<std::size_t>(std::count(flags.begin(), flags.end(), true));
    };
    report.require(count(being_saved_) == saves, "I3: device ids of the ", ids.tier(),
                   " copies count as being saved without a save");
    for (const BlockId id : queue_) {
        report.require(is_queued_[at(id)], "I6: device id ", id, " of the ", ids.tier(),
                       " copies is queued without its flag");
    }
    report.require(count(is_queued_) == queue_.size(), "I6: device ids of the ", ids.tier(),
                   " copies have a flag, but are not queued");
    pool_.check(report, std::move(ids), readers, index_.tree());
}

}  // namespace aiokv
