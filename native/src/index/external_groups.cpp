#include "aiokv/external_groups.hpp"

#include <algorithm>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

GroupPool no_device_pool(const WindowConfig& window, std::uint32_t block_tokens) {
    return {0, window.tail_blocks(block_tokens), window.head_blocks(block_tokens)};
}

}  // namespace

ExternalGroups::ExternalGroups(const CoreConfig& config, DevicePool& device,
                               const LeaseTable& leases, Index& index, TransferLedger& transfers,
                               DeviceUses& uses)
    : config_(config),
      device_(device),
      leases_(leases),
      index_(index),
      transfers_(transfers),
      uses_(uses) {
    if (!config.external_device) return;
    for (const WindowConfig& window : config.windows) {
        if (window.host_blocks == 0) {
            throw ConfigError("host_blocks of a group is 0, and the device blocks are external")
                .field("windows");
        }
        groups_.emplace_back(config, static_cast<GroupId>(groups_.size()), index, transfers,
                             no_device_pool(window, config.block_tokens), window.host_blocks);
    }
    queues_.resize(groups_.size());
}

// Visits the blocks of a hit that the model needs to continue behind it, in path order.
template <class Visit>
void ExternalGroups::for_each_needed(const BlockGroup& group, std::size_t hits, Visit visit) {
    const std::size_t tail = hits - std::min<std::size_t>(hits, group.pool.tail_blocks());
    for (std::size_t i = 0; i < std::min<std::size_t>(tail, group.pool.head_blocks()); ++i) {
        visit(i);
    }
    for (std::size_t i = tail; i < hits; ++i) visit(i);
}

// -- leases --------------------------------------------------------------------------------------

void ExternalGroups::take(Lease& lease) {
    lease.external.resize(groups_.size());
    for (BlockGroup& group : groups_) {
        ExternalTable& table = lease.external[static_cast<std::size_t>(group.number())];
        for_each_needed(group, lease.path.size(), [&](std::size_t i) {
            group.note_hit(lease.path[i]);
            table.pinned.push_back(group.host->pool().find(lease.path[i]));
            group.host->pool().add_reader(table.pinned.back());
        });
        table.hit.host_blocks = static_cast<std::uint32_t>(table.pinned.size());
    }
}

void ExternalGroups::release(Lease& lease) {
    for (std::size_t g = 0; g < lease.external.size(); ++g) {
        for (const BlockId id : lease.external[g].pinned) groups_[g].host->pool().remove_reader(id);
    }
    lease.external.clear();
    lease.named_from = 0;
    lease.awaited_ids.clear();
}

void ExternalGroups::check_hit(const Lease& lease, std::span<const BlockId> ids,
                               std::size_t first) const {
    const std::size_t hits = lease.cached_tokens / config_.block_tokens;
    const std::size_t width = ids.size() / std::max<std::size_t>(groups_.size(), 1);
    for (const BlockGroup& group : groups_) {
        for_each_needed(group, hits, [&](std::size_t i) {
            const auto g = static_cast<std::size_t>(group.number());
            if (i < first || (width > 0 && ids[g * width + i] != kNoBlock)) return;
            throw LeaseError("assign: group " + str(g) + " has no id for block " + str(i) +
                             ", which the hit of " + str(lease.cached_tokens) + " positions needs")
                .of(lease.id())
                .hint("name the blocks of all groups in the first call");
        });
    }
}

void ExternalGroups::name(Lease& lease, std::span<const BlockId> ids, std::size_t old,
                          std::size_t computed) {
    const std::size_t blocks = lease.table.size() - old;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        std::vector<BlockId>& named = lease.external[g].ids;
        named.resize(old - lease.named_from, kNoBlock);
        for (std::size_t i = 0; i < blocks; ++i) {
            const BlockId id = ids.empty() ? kNoBlock : ids[g * blocks + i];
            named.push_back(id);
            if (i < computed && id != kNoBlock && uses_.is_written(id)) {
                lease.awaited_ids.push_back(id);
            }
        }
    }
}

void ExternalGroups::begin_onloads(Lease& lease, std::size_t first) {
    for (BlockGroup& group : groups_) {
        ExternalTable& table = lease.external[static_cast<std::size_t>(group.number())];
        Move move;
        move.lease = lease.id();
        move.route = MoveRoute::kFromHost;
        move.group = group.number();
        auto pinned = table.pinned.begin();
        for_each_needed(group, lease.cached_tokens / config_.block_tokens, [&](std::size_t i) {
            const BlockId source = *pinned++;
            if (i < first) return group.host->pool().remove_reader(source);
            const BlockId target = table.ids[i];
            move.sources.push_back(source);
            move.targets.push_back(target);
            move.after_step = std::max(move.after_step, device_.after_step(target));
        });
        table.pinned.clear();
        if (move.targets.empty()) continue;
        uses_.begin_write(move.targets, lease.id());
        const TransferId id = transfers_.begin_move(std::move(move));
        const BlockId hit_end = lease.table[lease.cached_tokens / config_.block_tokens - 1];
        uses_.begin_write({&hit_end, 1}, lease.id());
        in_flight_.emplace(id, InFlight{lease.id(), hit_end, {}});
        lease.onloads.push_back(id);
    }
}

void ExternalGroups::truncate(Lease& lease, std::size_t blocks) {
    lease.named_from = std::min(lease.named_from, static_cast<std::uint32_t>(blocks));
    for (ExternalTable& table : lease.external) {
        table.ids.resize(std::min(table.ids.size(), blocks - lease.named_from));
    }
}

BlockId ExternalGroups::named(const Lease& lease, std::size_t group, std::size_t block) const {
    const std::vector<BlockId>& ids = lease.external[group].ids;
    const std::size_t i = block - lease.named_from;
    return block < lease.named_from || i >= ids.size() ? kNoBlock : ids[i];
}

void ExternalGroups::use_computed(const Lease& lease, std::size_t end, Step step) {
    for (std::size_t g = 0; g < lease.external.size(); ++g) {
        for (std::size_t i = lease.computed_tokens / config_.block_tokens; i < end; ++i) {
            if (const BlockId id = named(lease, g, i); id != kNoBlock) device_.use_in(id, step);
        }
    }
}

bool ExternalGroups::awaits_onload(Lease& lease) const {
    std::erase_if(lease.awaited_ids, [this](BlockId id) { return !uses_.is_written(id); });
    return !lease.awaited_ids.empty();
}

// Returns the leases that have named one of these ids while an onload wrote it, or have the end of
// the hit.
std::vector<LeaseId> ExternalGroups::readers_of(std::span<const BlockId> ids,
                                                BlockId hit_end) const {
    std::vector<LeaseId> found;
    if (ids.empty()) return found;
    const auto contains = [](const std::vector<BlockId>& in, BlockId id) {
        return std::find(in.begin(), in.end(), id) != in.end();
    };
    for (const Lease& lease : leases_) {
        const bool reads = std::any_of(ids.begin(), ids.end(),
                                       [&](BlockId id) { return contains(lease.awaited_ids, id); });
        if (reads || contains(lease.table, hit_end)) found.push_back(lease.id());
    }
    return found;
}

// -- saves ---------------------------------------------------------------------------------------

std::uint32_t ExternalGroups::save(const Lease& lease, std::size_t block, SavePlace place) {
    const bool is_node = (place & kSaveBit) == 0;
    std::uint32_t queued = 0;
    for (std::size_t g = 0; g < lease.external.size(); ++g) {
        const BlockId device = named(lease, g, block);
        const auto group = static_cast<GroupId>(g);
        if (device == kNoBlock || by_place_.contains({group, place})) continue;
        if (is_node) {
            const auto node = static_cast<NodeId>(place);
            if (groups_[g].host->pool().find(node) != kNoBlock) continue;
            index_.tree()[node].set(kHasSides);
        }
        auto index = static_cast<SaveIndex>(saves_.size());
        if (free_.empty()) {
            saves_.emplace_back();
        } else {
            index = free_.back();
            free_.pop_back();
        }
        saves_[index] = {State::kQueued, false, group, place, device, kNoBlock, lease.id()};
        by_place_.emplace(std::pair{group, place}, index);
        queues_[g].push_back(index);
        uses_.begin_read({&device, 1}, lease.id());
        ++queued;
    }
    return queued;
}

void ExternalGroups::forget_ids(Lease& lease, std::size_t blocks) {
    if (blocks <= lease.named_from) return;
    for (ExternalTable& table : lease.external) {
        const std::size_t known = std::min(blocks - lease.named_from, table.ids.size());
        table.ids.erase(table.ids.begin(), table.ids.begin() + static_cast<std::ptrdiff_t>(known));
    }
    lease.named_from = static_cast<std::uint32_t>(blocks);
}

// The first save of a node is kept.
void ExternalGroups::settle(SaveId block, NodeId node) {
    for (const BlockGroup& group : groups_) {
        const auto found = by_place_.find({group.number(), kSaveBit | block});
        if (found == by_place_.end()) continue;
        const SaveIndex index = found->second;
        const bool is_known =
            by_place_.contains({group.number(), node}) || group.host_pool()->find(node) != kNoBlock;
        if (is_known) {
            lose_at(index);
            continue;
        }
        Save& save = saves_[index];
        unlink(save);
        save.place = node;
        by_place_.emplace(std::pair{save.group, save.place}, index);
        index_.tree()[node].set(kHasSides);
        if (save.state == State::kProven) attach(index);
    }
}

void ExternalGroups::lose(SaveId block) {
    for (const BlockGroup& group : groups_) {
        const auto found = by_place_.find({group.number(), kSaveBit | block});
        if (found != by_place_.end()) lose_at(found->second);
    }
}

void ExternalGroups::forget(NodeId node) {
    for (const BlockGroup& group : groups_) {
        const auto found = by_place_.find({group.number(), node});
        if (found != by_place_.end()) lose_at(found->second);
    }
}

// Drops a save. The record of a queued one is freed when the queue is taken, and that of a copy in
// flight when the copy ends (I3).
void ExternalGroups::lose_at(SaveIndex index) {
    Save& save = saves_[index];
    unlink(save);
    const State old = std::exchange(save.state, State::kLost);
    if (old == State::kQueued) uses_.end_read({&save.device, 1}, save.reader);
    if (old != State::kProven) return;
    at(save.group).host->pool().give_back(save.host, 0);
    free(index);
}

void ExternalGroups::free(SaveIndex index) {
    saves_[index] = {};
    free_.push_back(index);
}

// The first proven copy is kept: a store may have brought another one.
void ExternalGroups::attach(SaveIndex index) {
    const Save& save = saves_[index];
    const auto node = static_cast<NodeId>(save.place);
    HostCopies& host = *at(save.group).host;
    unlink(save);
    if (host.pool().find(node) == kNoBlock) {
        host.attach(node, save.host);
        index_.change();
    } else {
        host.pool().give_back(save.host, 0);
    }
    free(index);
}

void ExternalGroups::note_overwritten(BlockId device) {
    for (SaveIndex index = 0; index < saves_.size(); ++index) {
        Save& save = saves_[index];
        if (save.device != device) continue;
        if (save.state == State::kQueued) lose_at(index);
        if (save.state == State::kCopying) save.overwritten = true;
    }
}

bool ExternalGroups::wants_saves() const {
    return std::any_of(queues_.begin(), queues_.end(),
                       [](const auto& queue) { return !queue.empty(); });
}

// The last blocks are taken if the host has not room for all: a later hit needs them first.
TransferId ExternalGroups::take_save() {
    for (BlockGroup& group : groups_) {
        auto& queue = queues_[static_cast<std::size_t>(group.number())];
        if (queue.empty()) continue;
        std::vector<SaveIndex> taken = std::exchange(queue, {});
        std::erase_if(taken, [this](SaveIndex index) {
            const bool is_lost = saves_[index].state == State::kLost;
            if (is_lost) free(index);
            return is_lost;
        });
        const std::size_t room = group.host->pool().room();
        const std::size_t skipped = taken.size() - std::min(taken.size(), room);
        for (std::size_t i = 0; i < skipped; ++i) {
            lose_at(taken[i]);
            free(taken[i]);
        }
        taken.erase(taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(skipped));
        if (taken.empty()) continue;
        Move move;
        move.route = MoveRoute::kToHost;
        move.group = group.number();
        for (const SaveIndex index : taken) {
            Save& save = saves_[index];
            save.state = State::kCopying;
            save.host = group.host->take();
            move.sources.push_back(save.device);
            move.targets.push_back(save.host);
            move.after_step = std::max(move.after_step, device_.after_step(save.device));
        }
        const TransferId id = transfers_.begin_move(std::move(move));
        in_flight_[id].saves = std::move(taken);
        return id;
    }
    return 0;
}

void ExternalGroups::give_up_queue() {
    for (auto& queue : queues_) {
        for (const SaveIndex index : std::exchange(queue, {})) {
            if (saves_[index].state == State::kQueued) lose_at(index);
            free(index);
        }
    }
}

// -- transfers -----------------------------------------------------------------------------------

std::vector<LeaseId> ExternalGroups::finish_move(TransferId id, const Move& move,
                                                 std::uint32_t good, bool failed) {
    const InFlight ended = std::move(in_flight_.extract(id).mapped());
    BlockGroup& group = at(move.group);
    if (move.route == MoveRoute::kFromHost) {
        uses_.end_write(move.targets, ended.named_by);
        for (std::size_t i = 0; i < move.targets.size(); ++i) {
            group.host->finish_read(move.sources[i], failed && i >= good);
        }
        uses_.end_write({&ended.hit_end, 1}, ended.named_by);
        group.onloaded += good;
        return readers_of(std::span(move.targets).subspan(good), ended.hit_end);
    }
    for (std::size_t i = 0; i < ended.saves.size(); ++i) {
        const SaveIndex index = ended.saves[i];
        Save& save = saves_[index];
        uses_.end_read({&save.device, 1}, save.reader);
        const bool has_arrived = i < good && !save.overwritten;
        if (save.state == State::kCopying) {
            save.state = State::kProven;
            if (!has_arrived) {
                lose_at(index);
            } else if ((save.place & kSaveBit) == 0) {
                attach(index);
            }
            continue;
        }
        group.host->pool().give_back(save.host, 0);
        free(index);
    }
    return {};
}

Step ExternalGroups::after_step(LeaseId lease) const {
    Step newest = 0;
    for (const Save& save : saves_) {
        if (save.reader != lease || save.state == State::kProven) continue;
        newest = std::max(newest, device_.after_step(save.device));
    }
    for (const auto& [id, flight] : in_flight_) {
        if (flight.named_by == lease) newest = std::max(newest, transfers_.move(id).after_step);
    }
    return newest;
}

void ExternalGroups::check(Report& report) const {
    std::vector<std::vector<BlockId>> owned(groups_.size());  // host ids
    std::size_t known = 0;
    for (SaveIndex index = 0; index < saves_.size(); ++index) {
        const Save& save = saves_[index];
        if (save.state == State::kFree) continue;
        if (save.state == State::kProven) {
            owned[static_cast<std::size_t>(save.group)].push_back(save.host);
            report.require((save.place & kSaveBit) != 0, "I4: proven copy ", index,
                           " waits for no block");
        }
        if (save.state == State::kQueued || save.state == State::kCopying) {
            report.require(uses_.is_read(save.device), "I3: save ", index, " reads device id ",
                           save.device, " unknown to leases");
        }
        if (save.state == State::kLost) continue;
        ++known;
        const auto found = by_place_.find({save.group, save.place});
        report.require(found != by_place_.end() && found->second == index, "I2: saved copy ", index,
                       " is not found at its block");
        if ((save.place & kSaveBit) != 0) continue;
        const auto node = static_cast<NodeId>(save.place);
        report.require(index_.tree().is_live(node) && !index_.tree()[node].has(kDetached),
                       "I2: saved copy ", index, " belongs to a dropped block");
    }
    report.require(known == by_place_.size(), "I2: ", known, " copies are being saved, ",
                   by_place_.size(), " can be found");
    for (const BlockGroup& group : groups_) {
        const auto g = static_cast<std::size_t>(group.number());
        std::vector<std::uint32_t> readers(group.host_pool()->capacity(), 0);
        for (const Lease& lease : leases_) {
            report.require(lease.external.empty() || lease.external.size() == groups_.size(),
                           "I1: a lease has ids of ", lease.external.size(), " external groups");
            if (g >= lease.external.size()) continue;
            for (const BlockId id : lease.external[g].pinned) {
                ++readers[static_cast<std::size_t>(id)];
            }
        }
        for (const auto& [id, move] : transfers_.moves()) {
            if (move.group != group.number() || move.route != MoveRoute::kFromHost) continue;
            for (const BlockId target : move.targets) {
                report.require(uses_.is_written(target), "I3: onload ", id, " writes device id ",
                               target, " unknown to leases");
            }
        }
        group.check(report, report.pool("external", 0), {}, std::move(readers), owned[g]);
    }
}

}  // namespace aiokv
