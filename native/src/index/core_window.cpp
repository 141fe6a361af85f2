// Sliding-window layers: groups of layers with block ids of their own, which go back early.
//
//   table   | sink: ids | -1: behind the window | [first, end): ids | -1: not reached yet |
//                                                ^ computed is in here
//
// The sink is the first `head_blocks` entries (none, without sink_tokens); while `first` is inside
// it, nothing lies behind the window. A lease has at most `reach_blocks` ids of a group at a time,
// and that many are set aside for it when it is granted: the sink, the window, and what one step
// computes. So ids follow the computed positions without waiting and without fail: those behind the
// window pay for those ahead. Indexed blocks keep their ids, idle, until their ids are needed; a
// hit may end where the sink and a whole window are still there.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {
namespace {

std::uint32_t ceil_div(std::uint64_t value, std::uint32_t by) {
    return static_cast<std::uint32_t>((value + by - 1) / by);
}

}  // namespace

WindowGroup::WindowGroup(const WindowConfig& config, std::uint32_t block_tokens)
    : pool(config.device_blocks,
           config.window_tokens == 0 ? 0 : ceil_div(config.window_tokens - 1, block_tokens),
           ceil_div(config.sink_tokens, block_tokens)),
      window_tokens(config.window_tokens),
      reach_blocks(config.device_blocks) {
    if (config.window_tokens == 0) throw ConfigError("window_tokens must be at least 1");
    const std::uint64_t step = std::max<std::uint32_t>(config.step_tokens, 1);
    const std::uint64_t least =
        std::uint64_t{ceil_div(config.window_tokens - 1 + step, block_tokens)} + 1 +
        pool.head_blocks();
    if (least > config.device_blocks) {
        const std::string sink =
            config.sink_tokens == 0 ? "" : "a sink of " + str(config.sink_tokens) + " tokens, ";
        throw ConfigError(sink + "a window of " + str(config.window_tokens) +
                          " tokens and steps of " + str(step) + " need " + std::to_string(least) +
                          " blocks; the group has " + str(config.device_blocks));
    }
    if (config.step_tokens > 0) reach_blocks = static_cast<std::uint32_t>(least);
}

// The first `head` and the last `tail` of `blocks`, or all when there are fewer, have an id of the
// group.
bool Core::covers(const SidePool& pool, const std::vector<NodeId>& path, std::size_t blocks) const {
    const auto has_id = [&](NodeId node) {
        return tree_[node].has(kHasSides) && pool.find(node) != kNoBlock;
    };
    const auto begin = path.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(blocks);
    const auto head =
        static_cast<std::ptrdiff_t>(std::min<std::size_t>(blocks, pool.head_blocks()));
    const auto tail =
        static_cast<std::ptrdiff_t>(std::min<std::size_t>(blocks, pool.tail_blocks()));
    return std::all_of(begin, begin + head, has_id) && std::all_of(end - tail, end, has_id);
}

// Ids of a group to set aside for a lease of so many blocks.
std::uint32_t Core::reserve_of(const WindowGroup& group, std::uint32_t total_blocks) const {
    return std::min(total_blocks, group.reach_blocks);
}

// Whether all leases can have `more` positions more, of what is set aside for windows.
bool Core::can_extend_windows(std::span<const LeaseId> ids, std::uint64_t more) const {
    for (std::size_t g = 0; g < windows_.size(); ++g) {
        std::uint64_t reserved = windows_[g].reserved;
        for (const LeaseId id : ids) {
            const Lease& lease = this->lease(id);
            const std::uint32_t held = lease.windows[g].reserved;
            reserved +=
                std::max(reserve_of(windows_[g], blocks_for(lease.num_tokens + more)), held);
            reserved -= held;
        }
        if (reserved > windows_[g].pool.capacity()) return false;
    }
    return true;
}

bool Core::has_window_room(const Lease& lease, std::uint32_t total_blocks) const {
    for (std::size_t g = 0; g < windows_.size(); ++g) {
        const std::uint32_t held = lease.windows.empty() ? 0 : lease.windows[g].reserved;
        const std::uint32_t wanted = std::max(reserve_of(windows_[g], total_blocks), held);
        if (windows_[g].reserved - held + wanted > windows_[g].pool.capacity()) return false;
    }
    return true;
}

// has_window_room() was true. A lease that comes back from a swap has its ids still.
void Core::take_windows(Lease& lease) {
    const bool fresh = lease.windows.empty();
    lease.windows.resize(windows_.size());
    for (std::size_t g = 0; g < windows_.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        fit_window(group, window, lease, 0);
        if (!fresh) continue;
        const std::size_t hits = lease.path.size();
        window.first = static_cast<std::uint32_t>(
            hits - std::min<std::size_t>(hits, group.pool.tail_blocks()));
        window.end = static_cast<std::uint32_t>(hits);
        for (std::size_t i = 0; i < hits; ++i) {
            if (i < window.first && !group.is_sink(i)) continue;
            const BlockId id = group.pool.find(lease.path[i]);
            group.pool.hold(id);
            window.table[i] = id;
        }
        fill_window(group, window);
    }
}

// As many entries as the lease has blocks, and the reserve with it.
void Core::fit_window(WindowGroup& group, WindowTable& window, const Lease& lease, Step step) {
    const auto total = static_cast<std::uint32_t>(lease.table.size());
    while (window.end > std::max(total, window.first)) drop_from(group, window, --window.end, step);
    window.table.resize(total, kNoBlock);
    const std::uint32_t reserved = std::max(window.reserved, reserve_of(group, total));
    group.reserved += reserved - window.reserved;
    window.reserved = reserved;
    if (window.end > 0) fill_window(group, window);
}

void Core::fit_windows(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        fit_window(windows_[g], lease.windows[g], lease, step);
    }
}

// Ids as far as the reach goes; there always are enough, for they are set aside.
void Core::fill_window(WindowGroup& group, WindowTable& window) {
    const auto total = static_cast<std::uint32_t>(window.table.size());
    const std::uint32_t behind = std::min(window.first, group.pool.head_blocks());
    const std::uint32_t end = std::min(total, window.first + window.reserved - behind);
    for (; window.end < end; ++window.end) {
        version_ += group.pool.take(window.table[window.end]);
    }
}

// Blocks of the path that were indexed just now; first proof wins.
void Core::publish_windows(Lease& lease, std::size_t first) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        for (std::size_t i = first; i < lease.path.size() && i < window.end; ++i) {
            if (i < window.first && !group.is_sink(i)) continue;
            const NodeId node = lease.path[i];
            if (tree_[node].has(kDetached) || group.pool.find(node) != kNoBlock) continue;
            if (group.pool.holds(window.table[i]) > 0) continue;  // of a node that has gone
            group.pool.attach(node, window.table[i]);
            group.pool.hold(window.table[i]);
            tree_[node].set(kHasSides);
        }
    }
}

// The next position is `computed_tokens`: what lies behind its window goes back, but for the sink.
void Core::advance_windows(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        const std::uint32_t seen = std::min(lease.computed_tokens, group.window_tokens - 1);
        const std::uint32_t needed = (lease.computed_tokens - seen) / config_.block_tokens;
        const std::uint32_t stop = std::min(needed, window.end);
        for (; window.first < stop; ++window.first) {
            if (!group.is_sink(window.first)) drop_from(group, window, window.first, step);
        }
        fill_window(group, window);
    }
}

void Core::drop_from(WindowGroup& group, WindowTable& window, std::size_t index, Step step) {
    const BlockId id = window.table[index];
    if (group.pool.holds(id) > 0) {
        group.pool.use_in(id, step);
        group.pool.unhold(id);
    } else {
        group.pool.give_back(id, step);
    }
    window.table[index] = kNoBlock;
}

void Core::give_windows_back(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        while (window.end > window.first) drop_from(group, window, --window.end, step);
        window.end = std::min(window.first, group.pool.head_blocks());
        while (window.end > 0) drop_from(group, window, --window.end, step);
        group.reserved -= window.reserved;
    }
    lease.windows.clear();
}

// Positions that a step may compute now: those that have ids in every group.
std::uint32_t Core::reach_tokens(LeaseId id) const {
    const Lease& lease = this->lease(id);
    std::uint64_t reach = lease.num_tokens;
    for (const WindowTable& window : lease.windows) {
        reach = std::min(reach, std::uint64_t{window.end} * config_.block_tokens);
    }
    return static_cast<std::uint32_t>(reach);
}

}  // namespace aiokv
