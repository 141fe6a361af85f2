#include "aiokv/external_blocks.hpp"

#include <algorithm>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

namespace {

// Retired leases that wait for saves keep at most this part of the host blocks, or one lease does.
constexpr std::size_t kRetiringDivisor = 8;

// Visits the ids of the blocks `from` to `to - 1` of all groups.
template <class Visit>
void for_each_id(std::span<const BlockId> ids, std::span<const BlockId> group_ids, std::size_t from,
                 std::size_t to, Visit visit) {
    std::for_each(ids.begin() + static_cast<std::ptrdiff_t>(from),
                  ids.begin() + static_cast<std::ptrdiff_t>(to), visit);
    for (; !group_ids.empty(); group_ids = group_ids.subspan(ids.size())) {
        for (std::size_t i = from; i < to; ++i) {
            if (group_ids[i] != kNoBlock) visit(group_ids[i]);
        }
    }
}

}  // namespace

// -- assign --------------------------------------------------------------------------------------

void ExternalBlocks::assign(Lease& lease, std::span<const BlockId> ids,
                            std::int64_t computed_tokens, std::span<const BlockId> group_ids) {
    const std::size_t size = config_.block_tokens;
    if (!lease.has_blocks() || lease.is(LeaseState::kReleasing)) {
        throw LeaseError("assign: the lease is " + std::string(name_of(lease.state)) +
                         " and takes no blocks")
            .of(lease.id())
            .hint("call allocate first");
    }
    check_ids(lease, ids, group_ids);
    const std::size_t old = lease.table.size();
    const std::size_t cached = lease.cached_tokens / size;
    if (old > 0 && computed_tokens != 0) {
        throw UsageError("assign: computed_tokens is " + std::to_string(computed_tokens) +
                         ", but the lease has " + str(old) +
                         " blocks already; only the first call may name computed positions")
            .of(lease.id());
    }
    std::size_t first_new = 0;  // index of the first id with a position that is not computed
    std::size_t first_onload = cached;
    if (old == 0) {
        check_computed(lease, ids.size(), computed_tokens);
        const auto computed = static_cast<std::uint32_t>(computed_tokens);
        first_onload = std::min<std::size_t>(computed / size, cached);
        if (!ids.empty()) {
            check_hit(lease, ids.size(), first_onload);
            groups_.check_hit(lease, group_ids, first_onload);
        }
        first_new = std::max<std::size_t>(cached, config_.blocks_for(computed));
        const std::size_t end = std::min(cached, ids.size());
        for_each_id(ids, group_ids, std::min(first_onload, end), end,
                    [&](BlockId id) { check_target(lease, id); });
    }
    first_new = std::min(first_new, ids.size());
    for_each_id(ids, group_ids, first_new, ids.size(), [&](BlockId id) {
        if (!uses_.is_written(id)) return;
        throw UsageError("assign: an onload in flight writes block " + std::to_string(id) +
                         ", which the lease is to compute")
            .of(lease.id())
            .hint("wait until the leases that had the block are idle before it is used again");
    });
    for_each_id(ids, group_ids, first_new, ids.size(), [&](BlockId id) {
        if (uses_.is_read(id)) saves_.note_overwritten(id);
    });
    lease.table.insert(lease.table.end(), ids.begin(), ids.end());
    groups_.name(lease, group_ids, old, first_new);
    lease.num_tokens = static_cast<std::uint32_t>(
        std::min<std::size_t>(lease.table.size() * size, static_cast<std::size_t>(kMaxTokens)));
    if (old > 0 || ids.empty()) return;
    lease.computed_tokens =
        std::max(lease.computed_tokens, static_cast<std::uint32_t>(computed_tokens));
    if (first_onload < cached) begin_onload(lease, first_onload);
    groups_.begin_onloads(lease, first_onload);
}

void ExternalBlocks::refuse_always(const char* call, const char* hint) {
    throw UsageError(std::string(call) +
                     ": with external_device, a server owns the device blocks, not the engine")
        .field("external_device")
        .hint(hint);
}

void ExternalBlocks::check_id(const Lease& lease, BlockId id, std::uint32_t device_blocks) {
    if (id < 0 || static_cast<std::uint32_t>(id) >= device_blocks) {
        throw UsageError("assign: block id " + std::to_string(id) +
                         " is out of range; the device has " + str(device_blocks) +
                         " blocks, from 0 on")
            .of(lease.id())
            .field("device_blocks");
    }
    std::uint32_t& seen = seen_[static_cast<std::size_t>(id)];
    if (seen == check_) {
        throw UsageError("assign: block id " + std::to_string(id) + " is listed twice")
            .of(lease.id());
    }
    seen = check_;
}

void ExternalBlocks::check_ids(const Lease& lease, std::span<const BlockId> ids,
                               std::span<const BlockId> group_ids) {
    if (seen_.empty()) seen_.resize(config_.device_blocks, 0);
    if (++check_ == 0) {
        std::fill(seen_.begin(), seen_.end(), 0);
        check_ = 1;
    }
    if (!group_ids.empty() && group_ids.size() != ids.size() * groups_.groups().size()) {
        throw UsageError("assign: " + str(group_ids.size()) + " ids of groups for " +
                         str(ids.size()) + " blocks and " + str(groups_.groups().size()) +
                         " groups")
            .of(lease.id())
            .field("windows");
    }
    for (const BlockId id : ids) check_id(lease, id, config_.device_blocks);
    for (std::size_t i = 0; i < group_ids.size(); ++i) {
        if (group_ids[i] == kNoBlock) continue;
        check_id(lease, group_ids[i], config_.windows[i / ids.size()].device_blocks);
    }
    const auto known = std::find_if(lease.table.begin(), lease.table.end(), [this](BlockId id) {
        return seen_[static_cast<std::size_t>(id)] == check_;
    });
    if (known != lease.table.end()) {
        throw UsageError("assign: the lease has block " + std::to_string(*known) + " already")
            .of(lease.id());
    }
    const std::size_t total = lease.table.size() + ids.size();
    if (total > config_.blocks_for(kMaxTokens)) {
        throw UsageError("assign: " + str(total) + " blocks have more than " +
                         std::to_string(kMaxTokens) + " positions")
            .of(lease.id());
    }
}

void ExternalBlocks::check_computed(const Lease& lease, std::size_t blocks,
                                    std::int64_t computed_tokens) const {
    const auto positions = static_cast<std::int64_t>(blocks * config_.block_tokens);
    if (computed_tokens < 0 || computed_tokens > positions) {
        throw UsageError("assign: computed_tokens is " + std::to_string(computed_tokens) +
                         "; it must be between 0 and the " + std::to_string(positions) +
                         " positions of the blocks")
            .of(lease.id());
    }
    const bool ends_inside = computed_tokens % config_.block_tokens != 0;
    if (ends_inside && positions - computed_tokens > config_.block_tokens) {
        throw UsageError("assign: computed_tokens is " + std::to_string(computed_tokens) +
                         "; it must be a multiple of block_tokens (" + str(config_.block_tokens) +
                         "), or end in the last block")
            .of(lease.id())
            .field("block_tokens");
    }
}

// Checks that the first ids cover the hit, and that its host copies still exist.
void ExternalBlocks::check_hit(const Lease& lease, std::size_t blocks, std::size_t first) const {
    const std::size_t cached = lease.cached_tokens / config_.block_tokens;
    if (blocks < cached) {
        throw LeaseError("assign: " + str(blocks) + " blocks do not cover the " +
                         str(lease.cached_tokens) + " cached positions, which need " + str(cached))
            .of(lease.id())
            .hint(
                "let the first call name all of them, or preempt the lease and allocate fewer "
                "positions");
    }
    if (first >= cached) return;
    const std::size_t attached = index_.attached_blocks(lease);
    if (index_.is_of_epoch(lease) && attached >= cached) return;
    throw LeaseError("assign: cached positions from " +
                     str(index_.is_of_epoch(lease) ? attached * config_.block_tokens : 0) +
                     " on were dropped after the lease was allocated")
        .of(lease.id())
        .hint("preempt the lease, then allocate again");
}

void ExternalBlocks::check_target(const Lease& lease, BlockId id) const {
    const bool is_read = uses_.is_read(id);
    if (!is_read && !uses_.is_written(id)) return;
    throw UsageError("assign: " + std::string(is_read ? "a save reads" : "an onload writes") +
                     " block " + std::to_string(id) +
                     ", into which cached positions are to be copied")
        .of(lease.id())
        .hint("wait until the leases that had the block are idle before it is used again");
}

// -- onloads -------------------------------------------------------------------------------------

void ExternalBlocks::begin_onload(Lease& lease, std::size_t first) {
    Onload onload;
    onload.named_by = lease.id();
    onload.first_block = static_cast<std::uint32_t>(first);
    Transfer& transfer = onload.transfer;
    transfer.leases.push_back(lease.id());
    for (std::size_t i = first; i < lease.cached_tokens / config_.block_tokens; ++i) {
        const BlockId device = lease.table[i];
        transfer.nodes.push_back(lease.path[i]);
        transfer.device_blocks.push_back(device);
        transfer.host_blocks.push_back(index_.tree()[lease.path[i]].host);
        transfer.after_step = std::max(transfer.after_step, device_.after_step(device));
    }
    uses_.begin_write(transfer.device_blocks, onload.named_by);
    residency_.hold(transfer.nodes);
    const TransferId id = transfers_.begin_other();
    onloads_.emplace(id, std::move(onload));
    lease.onloads.push_back(id);
}

const Transfer& ExternalBlocks::get(TransferId id) const {
    const auto found = onloads_.find(id);
    return found == onloads_.end() ? saves_.get(id) : found->second.transfer;
}

Step ExternalBlocks::after_step(LeaseId lease) const {
    Step newest = std::max(saves_.after_step(lease), groups_.after_step(lease));
    for (const auto& [id, onload] : onloads_) {
        if (onload.named_by == lease) newest = std::max(newest, onload.transfer.after_step);
    }
    return newest > device_.finished_step() ? newest : 0;
}

void ExternalBlocks::leave_onload(TransferId id, LeaseId lease) {
    std::erase(onloads_.at(id).transfer.leases, lease);
    abandoned_.push_back(id);
}

void ExternalBlocks::replace_lease(TransferId id, LeaseId from, LeaseId to) {
    std::vector<LeaseId>& leases = onloads_.at(id).transfer.leases;
    std::replace(leases.begin(), leases.end(), from, to);
}

std::vector<TransferId> ExternalBlocks::take_abandoned() {
    std::vector<TransferId> ids = std::exchange(abandoned_, {});
    std::erase_if(ids, [this](TransferId id) { return !onloads_.contains(id); });
    const std::vector<TransferId> moves = transfers_.take_abandoned();
    ids.insert(ids.end(), moves.begin(), moves.end());
    return ids;
}

ExternalEnd ExternalBlocks::complete(TransferId id, std::uint32_t good, bool cancelled) {
    const auto found = onloads_.find(id);
    if (found == onloads_.end()) {
        saves_.complete(id, good);
        return {};
    }
    const Onload onload = std::move(found->second);
    onloads_.erase(found);
    transfers_.end_other();
    const Transfer& transfer = onload.transfer;
    const auto blocks = static_cast<std::uint32_t>(transfer.nodes.size());
    uses_.end_write(transfer.device_blocks, onload.named_by);
    onloaded_ += good;
    ExternalEnd end;
    if (!transfer.leases.empty()) end.lease = transfer.leases.front();
    if (good < blocks && !cancelled) {
        failed_ += blocks - good;
        residency_.lose_host_copy(transfer.nodes[good]);
    }
    residency_.unhold(transfer.nodes);
    end.failed = good < blocks;
    end.good_blocks = onload.first_block + good;
    if (end.failed) {
        end.sharing = leases_with(
            {transfer.device_blocks.begin() + good, transfer.device_blocks.end()}, end.lease);
    }
    return end;
}

// Returns the leases that have named one of the ids: the server may share an id while an onload
// writes it.
std::vector<std::pair<LeaseId, std::uint32_t>> ExternalBlocks::leases_with(std::vector<BlockId> ids,
                                                                           LeaseId except) const {
    std::sort(ids.begin(), ids.end());
    const auto is_listed = [&ids](BlockId id) {
        return std::binary_search(ids.begin(), ids.end(), id);
    };
    std::vector<std::pair<LeaseId, std::uint32_t>> found;
    for (const Lease& lease : leases_) {
        if (lease.id() == except || !lease.has_blocks()) continue;
        const auto first = std::find_if(lease.table.begin(), lease.table.end(), is_listed);
        if (first == lease.table.end()) continue;
        found.emplace_back(lease.id(), static_cast<std::uint32_t>(first - lease.table.begin()));
    }
    return found;
}

void ExternalBlocks::give_up(Lease& lease) {
    saves_.leave(lease);
    residency_.unref(lease.path);
    lease.path.clear();
    lease.table.clear();
    lease.retires = false;
}

bool ExternalBlocks::can_retire(const Lease& lease) const {
    return lease.is(LeaseState::kGranted) && !lease.table.empty() && lease.onloads.empty() &&
           lease.flags.writes && !lease.save_failed && index_.is_of_epoch(lease) &&
           !groups_.exist();
}

void ExternalBlocks::retire(Lease& lease) {
    saves_.retire(lease);
    const std::size_t blocks = lease.path.size() + lease.saving.size();
    retiring_.push_back({lease.id(), blocks});
    retiring_blocks_ += blocks;
    end_retiring();
}

void ExternalBlocks::end_retiring() {
    // A slow store must not fill host memory with copies of blocks that the server has.
    const std::size_t most = config_.host_blocks / kRetiringDivisor;
    while (!retiring_.empty()) {
        const auto [id, blocks] = retiring_.front();
        if (leases_.is_open(id) && leases_.at(id).retires) {
            const bool has_room = retiring_blocks_ <= most || retiring_.size() == 1;
            if (has_room && awaits_saves(leases_.at(id))) return;
            drop_retiring(leases_.at(id));
        }
        retiring_blocks_ -= blocks;
        retiring_.pop_front();
    }
}

// Returns true if blocks of the lease are being saved, or wait for a save that a store policy wants
// now.
bool ExternalBlocks::awaits_saves(const Lease& lease) const {
    if (!lease.saving.empty()) return true;
    const auto attached = std::span(lease.path).first(index_.attached_blocks(lease));
    return std::any_of(attached.rbegin(), attached.rend(),
                       [this](NodeId node) { return stored_.has(node, kSaveQueued | kSaving); });
}

void ExternalBlocks::drop_retiring(Lease& lease) {
    if (!lease.retires) return;
    lease.retires = false;
    saves_.leave(lease);
    const std::size_t attached = index_.attached_blocks(lease);
    residency_.unref(lease.path);
    residency_.evict_first(std::span(lease.path).first(attached));
    lease.path.clear();
}

void ExternalBlocks::add_to(CoreStatistics& statistics) const {
    statistics.attention.onloaded_blocks += onloaded_;
    statistics.failed_blocks += failed_;
    saves_.add_to(statistics);
}

void ExternalBlocks::check(Report& report) const {
    if (!exist()) return;
    std::size_t retiring_blocks = 0;
    for (const Retiring& each : retiring_) retiring_blocks += each.blocks;
    report.require(retiring_blocks == retiring_blocks_, "I5: retired leases have ", retiring_blocks,
                   " blocks, not ", retiring_blocks_);
    for (const Lease& lease : leases_) {
        report.require(
            !lease.retires || std::ranges::count(retiring_, lease.id(), &Retiring::lease) > 0,
            "I5: retired lease ", lease.id(), " does not wait for saves");
    }
    for (const auto& [id, onload] : onloads_) {
        const Transfer& transfer = onload.transfer;
        for (std::size_t i = 0; i < transfer.nodes.size(); ++i) {
            const NodeId node = transfer.nodes[i];
            ++report.holds[node];
            report.require(
                index_.tree().is_live(node) && index_.tree()[node].host == transfer.host_blocks[i],
                "I3: onload ", id, " block ", i, " changed under way");
            report.require(uses_.is_written(transfer.device_blocks[i]), "I3: onload ", id,
                           " writes device id ", transfer.device_blocks[i], " unknown to leases");
        }
    }
    saves_.check(report);
    groups_.check(report);
}

}  // namespace aiokv
