#include "aiokv/sliding_windows.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

std::uint32_t ceil_div(std::uint64_t value, std::uint32_t by) {
    return static_cast<std::uint32_t>((value + by - 1) / by);
}

const WindowConfig& window_of(const CoreConfig& config, GroupId number) {
    return config.windows[static_cast<std::size_t>(number)];
}

GroupPool make_pool(const CoreConfig& config, GroupId number) {
    const WindowConfig& window = window_of(config, number);
    return {window.device_blocks, window.tail_blocks(config.block_tokens),
            window.head_blocks(config.block_tokens)};
}

}  // namespace

WindowGroup::WindowGroup(const CoreConfig& core_config, GroupId number, Index& index,
                         TransferLedger& transfers)
    : BlockGroup(core_config, number, index, transfers, make_pool(core_config, number),
                 window_of(core_config, number).host_blocks),
      window_tokens(window_of(core_config, number).window_tokens),
      reach_blocks(pool.capacity()) {
    const WindowConfig& config = window_of(core_config, number);
    const std::uint32_t block_tokens = core_config.block_tokens;
    if (config.window_tokens == 0) {
        throw ConfigError("window_tokens is 0; it must be at least 1").field("windows");
    }
    const std::uint64_t step = std::max<std::uint32_t>(config.step_tokens, 1);
    const std::uint64_t least =
        std::uint64_t{ceil_div(config.window_tokens - 1 + step, block_tokens)} + 1 +
        pool.head_blocks();
    if (least > config.device_blocks) {
        const std::string sink =
            config.sink_tokens == 0 ? "" : "a sink of " + str(config.sink_tokens) + " tokens, ";
        throw ConfigError(sink + "a window of " + str(config.window_tokens) +
                          " tokens and steps of " + str(step) + " need " + std::to_string(least) +
                          " blocks; the group has " + str(config.device_blocks))
            .field("windows")
            .hint("give the group more device_blocks, or a smaller window or step_tokens");
    }
    if (config.step_tokens > 0) reach_blocks = static_cast<std::uint32_t>(least);
}

SlidingWindows::SlidingWindows(const CoreConfig& config, Index& index, const LeaseTable& leases,
                               TransferLedger& transfers)
    : config_(config), index_(index), leases_(leases), transfers_(transfers) {
    if (config.external_device) return;  // see ExternalGroups
    for (std::size_t g = 0; g < config.windows.size(); ++g) {
        groups_.emplace_back(config, static_cast<GroupId>(g), index, transfers);
    }
}

// Visits the entries of a hit for which a lease has ids: those of the sink and those of the window.
template <class Visit>
void SlidingWindows::for_each_needed(const WindowGroup& group, std::size_t hits, Visit visit) {
    const std::size_t first = hits - std::min<std::size_t>(hits, group.pool.tail_blocks());
    for (std::size_t i = 0; i < first && group.is_sink(i); ++i) visit(i);
    for (std::size_t i = first; i < hits; ++i) visit(i);
}

bool SlidingWindows::can_onload(std::span<const NodeId> path, std::size_t blocks) const {
    return std::all_of(groups_.begin(), groups_.end(), [&](const WindowGroup& group) {
        if (!group.host) return true;
        std::size_t absent = 0;
        std::vector<BlockId> hit;
        for_each_needed(group, blocks, [&](std::size_t i) {
            const BlockId id = group.pool.find(path[i]);
            absent += id == kNoBlock;
            if (id != kNoBlock) hit.push_back(id);
        });
        return absent == 0 || group.pool.has_writable(absent, [&hit](BlockId id) {
            return std::find(hit.begin(), hit.end(), id) != hit.end();
        });
    });
}

const std::vector<BlockId>& SlidingWindows::table_of(const Lease& lease, std::size_t group) const {
    static const std::vector<BlockId> none;
    if (group >= groups_.size()) {
        throw UsageError("block_table: there is no window group " + std::to_string(group) +
                         "; the cache has " + std::to_string(groups_.size()))
            .field("windows");
    }
    return lease.windows.empty() ? none : lease.windows[group].table;
}

void SlidingWindows::use_computed(const Lease& lease, std::uint32_t end, Step step) {
    const std::size_t first = lease.computed_tokens / config_.block_tokens;
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        const WindowTable& window = lease.windows[g];
        for (std::size_t i = first; i < config_.blocks_for(end); ++i) {
            groups_[g].pool.use_in(window.table[i], step);
        }
    }
}

void SlidingWindows::use_in(const Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        const WindowTable& window = lease.windows[g];
        GroupPool& pool = groups_[g].pool;
        for (std::size_t i = 0; i < window.first && groups_[g].is_sink(i); ++i) {
            pool.use_in(window.table[i], step);
        }
        for (std::size_t i = window.first; i < window.end; ++i) pool.use_in(window.table[i], step);
    }
}

std::uint32_t SlidingWindows::reserve_of(const WindowGroup& group, std::uint32_t total_blocks) {
    return std::min(total_blocks, group.reach_blocks);
}

bool SlidingWindows::has_room(const Lease& lease, std::uint32_t total_blocks,
                              std::span<const std::uint64_t> given_up) const {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        const std::uint64_t reserved = std::uint64_t{groups_[g].reserved} + groups_[g].in_flight -
                                       (given_up.empty() ? 0 : given_up[g]);
        const std::uint32_t held = lease.windows.empty() ? 0 : lease.windows[g].reserved;
        const std::uint32_t wanted = std::max(reserve_of(groups_[g], total_blocks), held);
        if (reserved - held + wanted > groups_[g].pool.capacity()) return false;
    }
    return true;
}

void SlidingWindows::give_up(const Lease& lease, std::vector<std::uint64_t>& given_up) const {
    given_up.resize(groups_.size(), 0);
    for (std::size_t g = 0; g < lease.windows.size(); ++g) given_up[g] += lease.windows[g].reserved;
}

bool SlidingWindows::can_grow(std::span<const Growth> growths) const {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        std::uint64_t reserved = std::uint64_t{groups_[g].reserved} + groups_[g].in_flight;
        for (const Growth& growth : growths) {
            const std::uint32_t held = growth.lease->windows[g].reserved;
            const std::uint32_t total = config_.blocks_for(growth.num_tokens);
            reserved += std::max(reserve_of(groups_[g], total), held);
            reserved -= held;
        }
        if (reserved > groups_[g].pool.capacity()) return false;
    }
    return true;
}

void SlidingWindows::take(Lease& lease) {
    const bool fresh = lease.windows.empty();
    lease.windows.resize(groups_.size());
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        WindowGroup& group = groups_[g];
        WindowTable& window = lease.windows[g];
        fit_group(group, window, lease, 0);
        if (!fresh) continue;
        take_hit(group, window, lease);
        fill(group, window);
    }
}

// Takes the ids of the sink and of the window of the hit. Ids on the device get their reader first,
// so that making room for the others does not evict them.
void SlidingWindows::take_hit(WindowGroup& group, WindowTable& window, Lease& lease) {
    const std::size_t hits = lease.path.size();
    window.first =
        static_cast<std::uint32_t>(hits - std::min<std::size_t>(hits, group.pool.tail_blocks()));
    window.end = static_cast<std::uint32_t>(hits);
    std::vector<std::size_t> absent;
    for_each_needed(group, hits, [&](std::size_t i) {
        const BlockId id = group.pool.find(lease.path[i]);
        group.note_hit(lease.path[i]);
        window.table[i] = id;
        if (id == kNoBlock) return absent.push_back(i);
        ++window.hit.device_blocks;
        group.pool.add_reader(id);
        group.note_use(id);
    });
    window.hit.host_blocks = static_cast<std::uint32_t>(absent.size());
    if (!absent.empty()) onload(group, window, lease, absent);
}

// Copies these entries of the table from host memory. They have no ids yet.
void SlidingWindows::onload(WindowGroup& group, WindowTable& window, Lease& lease,
                            std::span<const std::size_t> entries) {
    Move move;
    move.lease = lease.id();
    move.route = MoveRoute::kFromHost;
    move.group = group.number();
    for (const std::size_t i : entries) {
        move.sources.push_back(group.host->pool().find(lease.path[i]));
        group.host->pool().add_reader(move.sources.back());
        window.table[i] = group.take_writable();
        move.targets.push_back(window.table[i]);
        move.after_step = std::max(move.after_step, group.pool.after_step(window.table[i]));
    }
    lease.onloads.push_back(transfers_.begin_move(std::move(move)));
}

// Gives the window table as many entries as the lease has blocks, and adapts the number of reserved
// ids.
void SlidingWindows::fit_group(WindowGroup& group, WindowTable& window, const Lease& lease,
                               Step step) {
    const auto total = static_cast<std::uint32_t>(lease.table.size());
    while (window.end > std::max(total, window.first)) drop(group, window, --window.end, step);
    window.table.resize(total, kNoBlock);
    const std::uint32_t reserved = std::max(window.reserved, reserve_of(group, total));
    group.reserved += reserved - window.reserved;
    window.reserved = reserved;
    if (window.end > 0) fill(group, window);
}

void SlidingWindows::fit(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        fit_group(groups_[g], lease.windows[g], lease, step);
    }
}

// Takes ids up to the reach of the group. They always suffice, because they are reserved.
void SlidingWindows::fill(WindowGroup& group, WindowTable& window) {
    const auto total = static_cast<std::uint32_t>(window.table.size());
    const std::uint32_t behind = std::min(window.first, group.pool.head_blocks());
    const std::uint32_t end = std::min(total, window.first + window.reserved - behind);
    for (; window.end < end; ++window.end) window.table[window.end] = group.take();
}

// The first proven copy is kept.
void SlidingWindows::publish(Lease& lease, std::size_t first) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = groups_[g];
        WindowTable& window = lease.windows[g];
        for (std::size_t i = first; i < lease.path.size() && i < window.end; ++i) {
            if (i < window.first && !group.is_sink(i)) continue;
            const NodeId node = lease.path[i];
            if (index_.tree()[node].has(kDetached) || group.pool.find(node) != kNoBlock) continue;
            if (group.pool.readers(window.table[i]) > 0) continue;  // still read for a dropped node
            group.attach(node, window.table[i]);
            group.pool.add_reader(window.table[i]);
            group.note_use(window.table[i]);
        }
    }
}

void SlidingWindows::advance(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = groups_[g];
        WindowTable& window = lease.windows[g];
        if (is_onloading(lease, g)) continue;
        const std::uint32_t seen = std::min(lease.computed_tokens, group.window_tokens - 1);
        const std::uint32_t needed = (lease.computed_tokens - seen) / config_.block_tokens;
        const std::uint32_t stop = std::min(needed, window.end);
        for (; window.first < stop; ++window.first) {
            if (!group.is_sink(window.first)) drop(group, window, window.first, step);
        }
        fill(group, window);
    }
}

void SlidingWindows::drop(WindowGroup& group, WindowTable& window, std::size_t index, Step step) {
    const BlockId id = window.table[index];
    if (id == kNoBlock) return;  // a move owns it now
    if (group.pool.readers(id) > 0) {
        group.pool.use_in(id, step);
        group.pool.remove_reader(id);
    } else {
        group.pool.give_back(id, step);
    }
    window.table[index] = kNoBlock;
}

void SlidingWindows::release(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = groups_[g];
        WindowTable& window = lease.windows[g];
        while (window.end > window.first) drop(group, window, --window.end, step);
        window.end = std::min(window.first, group.pool.head_blocks());
        while (window.end > 0) drop(group, window, --window.end, step);
        group.reserved -= window.reserved;
    }
    lease.windows.clear();
}

// -- moves between the tiers ---------------------------------------------------------------------

bool SlidingWindows::is_onloading(const Lease& lease, std::size_t group) const {
    return std::any_of(lease.onloads.begin(), lease.onloads.end(), [&](TransferId id) {
        return transfers_.is_move(id) && transfers_.move(id).group == static_cast<GroupId>(group);
    });
}

// Each lease may need one more block while the save reads its sources.
TransferId SlidingWindows::take_save() {
    const std::uint32_t growing = leases_.with_blocks();
    for (WindowGroup& group : groups_) {
        if (!group.host || !group.host->wants_saves()) continue;
        const std::uint32_t limit = group.spare() - std::min(group.spare(), growing);
        const TransferId id = group.host->take_save(limit);
        if (id == 0) continue;
        group.in_flight += static_cast<std::uint32_t>(transfers_.move(id).sources.size());
        return id;
    }
    return 0;
}

void SlidingWindows::orphan_move(Lease& lease, TransferId id, Step step) {
    const Move& move = transfers_.move(id);
    const auto g = static_cast<std::size_t>(move.group);
    for (const BlockId target : move.targets) groups_[g].pool.use_in(target, step);
    groups_[g].in_flight += static_cast<std::uint32_t>(move.targets.size());
    for (BlockId& entry : lease.windows[g].table) {
        const auto& targets = move.targets;
        if (std::find(targets.begin(), targets.end(), entry) != targets.end()) entry = kNoBlock;
    }
    transfers_.orphan_move(id);
}

// The first proven copy is kept: a block that has an id on the device again keeps that id.
void SlidingWindows::finish_move(const Move& move, std::uint32_t good, bool failed) {
    WindowGroup& group = groups_[static_cast<std::size_t>(move.group)];
    const auto blocks = static_cast<std::uint32_t>(move.targets.size());
    if (move.lease == 0) group.in_flight -= blocks;
    if (move.route == MoveRoute::kToHost) return group.host->finish_save(move, good);
    for (std::uint32_t i = 0; i < blocks; ++i) {
        const NodeId node = group.host->pool().node_of(move.sources[i]);
        const BlockId target = move.targets[i];
        const bool attaches = i < good && node != kNone && group.pool.find(node) == kNoBlock;
        if (attaches) group.attach(node, target);
        if (attaches && move.lease != 0) group.pool.add_reader(target);
        if (!attaches && move.lease == 0) group.pool.give_back(target, 0);
        group.host->finish_read(move.sources[i], failed && i >= good);
    }
    group.onloaded += good;
}

std::uint32_t SlidingWindows::max_extend_tokens(const Lease& lease) const {
    std::uint64_t reach = lease.num_tokens;
    for (const WindowTable& window : lease.windows) {
        reach = std::min(reach, std::uint64_t{window.end} * config_.block_tokens);
    }
    return static_cast<std::uint32_t>(reach);
}

// Checks one group: its ids, their readers, and the reserved ids.
void SlidingWindows::check_group(Report& report, std::size_t g) const {
    const WindowGroup& group = groups_[g];
    Ownership ids = report.pool("window", group.pool.capacity());
    std::uint32_t in_flight = 0;
    std::vector<std::uint32_t> readers(group.pool.capacity(), 0);
    std::uint64_t reserved = 0;
    for (const Lease& lease : leases_) {
        if (lease.windows.empty()) continue;
        const WindowTable& window = lease.windows[g];
        reserved += window.reserved;
        report.require(!lease.has_blocks() || window.table.size() == lease.table.size(),
                       "I1: a window table has ", window.table.size(), " entries of ",
                       lease.table.size());
        const auto ids_held = static_cast<std::size_t>(std::count_if(
            window.table.begin(), window.table.end(), [](BlockId id) { return id != kNoBlock; }));
        report.require(ids_held <= window.reserved, "I1: a window has ", ids_held, " ids of ",
                       window.reserved);
        for (std::size_t i = 0; i < window.table.size(); ++i) {
            const BlockId id = window.table[i];
            const bool inside = (i >= window.first || group.is_sink(i)) && i < window.end;
            report.require(inside == (id != kNoBlock), "I1: entry ", i, " of a window is ", id);
            if (id == kNoBlock) continue;
            if (group.pool.readers(id) > 0) {
                ++readers[static_cast<std::size_t>(id)];
            } else {
                ids.own(id, "a lease");
            }
        }
    }
    for (const auto& [id, move] : transfers_.moves()) {
        if (move.group != group.number()) continue;
        if (move.lease == 0) in_flight += static_cast<std::uint32_t>(move.targets.size());
        if (move.route == MoveRoute::kToHost) {
            for (const BlockId source : move.sources) ++readers[static_cast<std::size_t>(source)];
            continue;
        }
        for (const BlockId target : move.targets) {
            if (move.lease == 0) {
                ids.own(target, "a move");
                continue;
            }
            const std::vector<BlockId>& table = leases_.at(move.lease).windows[g].table;
            report.require(std::find(table.begin(), table.end(), target) != table.end() &&
                               group.pool.readers(target) == 0,
                           "I3: target ", target, " of window move ", id, " changed under way");
        }
    }
    report.require(in_flight == group.in_flight, "I1: ", group.in_flight,
                   " window blocks are set aside for moves of ", in_flight);
    report.require(reserved == group.reserved && reserved + in_flight <= group.pool.capacity(),
                   "I1: ", group.reserved, " window blocks are set aside, leases have ", reserved);
    group.check(report, std::move(ids), std::move(readers),
                std::vector<std::uint32_t>(group.host ? group.host->pool().capacity() : 0, 0));
}

void SlidingWindows::check(Report& report) const {
    for (const Lease& lease : leases_) {
        const bool has_tables =
            (lease.has_blocks() || lease.is(LeaseState::kSwapped)) && !groups_.empty();
        report.require(
            has_tables ? lease.windows.size() == groups_.size() || lease.is(LeaseState::kSwapped)
                       : lease.windows.empty(),
            "I1: a lease has tables of ", lease.windows.size(), " windows");
    }
    for (std::size_t g = 0; g < groups_.size(); ++g) check_group(report, g);
}

}  // namespace aiokv
