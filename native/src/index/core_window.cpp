// Sliding-window layers: groups of layers with block ids of their own, which go back early.
//
//   table   | -1: behind the window | [first, end): ids | -1: not reached yet |
//                                    ^ computed is in here
//
// A lease has at most `reach_blocks` ids of a group at a time, and that many are set aside for it
// when it is granted: the window, and what one step computes. So ids follow the computed positions
// without waiting and without fail: those behind the window pay for those ahead. Indexed blocks
// keep their ids, idle, as long as nobody needs the room; a hit may end where a whole window is
// still there.
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
           config.window_tokens == 0 ? 0 : ceil_div(config.window_tokens - 1, block_tokens)),
      window_tokens(config.window_tokens),
      reach_blocks(config.device_blocks) {
    if (config.window_tokens == 0) throw ConfigError("window_tokens must be at least 1");
    const std::uint64_t step = std::max<std::uint32_t>(config.step_tokens, 1);
    const std::uint32_t least = ceil_div(config.window_tokens - 1 + step, block_tokens) + 1;
    if (least > config.device_blocks) {
        throw ConfigError("a window of " + str(config.window_tokens) + " tokens and steps of " +
                          str(step) + " need " + str(least) + " blocks; the group has " +
                          str(config.device_blocks));
    }
    if (config.step_tokens > 0) reach_blocks = least;
}

// The last `tail` blocks before `blocks`, or all when there are fewer, have an id of the group.
bool Core::covers(const SidePool& pool, const std::vector<NodeId>& path, std::size_t blocks) const {
    const std::size_t tail = std::min<std::size_t>(blocks, pool.tail_blocks());
    for (std::size_t i = blocks; i-- > blocks - tail;) {
        if (!tree_[path[i]].has(kHasSides) || pool.find(path[i]) == kNoBlock) return false;
    }
    return true;
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
        window.end = window.first;
        for (; window.end < hits; ++window.end) {
            const BlockId id = group.pool.find(lease.path[window.end]);
            group.pool.hold(id);
            window.table[window.end] = id;
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
    const std::uint32_t end = std::min(total, window.first + window.reserved);
    for (; window.end < end; ++window.end) {
        version_ += group.pool.take(window.table[window.end]);
    }
}

// Blocks of the path that were indexed just now; first proof wins.
void Core::publish_windows(Lease& lease, std::size_t first) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        for (std::size_t i = std::max<std::size_t>(first, window.first);
             i < lease.path.size() && i < window.end; ++i) {
            const NodeId node = lease.path[i];
            if (tree_[node].has(kDetached) || group.pool.find(node) != kNoBlock) continue;
            if (group.pool.holds(window.table[i]) > 0) continue;  // of a node that has gone
            group.pool.attach(node, window.table[i]);
            group.pool.hold(window.table[i]);
            tree_[node].set(kHasSides);
        }
    }
}

// The next position is `computed_tokens`: what lies behind its window goes back.
void Core::advance_windows(Lease& lease, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = windows_[g];
        WindowTable& window = lease.windows[g];
        const std::uint32_t seen = std::min(lease.computed_tokens, group.window_tokens - 1);
        const std::uint32_t needed = (lease.computed_tokens - seen) / config_.block_tokens;
        const std::uint32_t stop = std::min(needed, window.end);
        for (; window.first < stop; ++window.first) drop_from(group, window, window.first, step);
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
        WindowTable& window = lease.windows[g];
        while (window.end > window.first) drop_from(windows_[g], window, --window.end, step);
        windows_[g].reserved -= window.reserved;
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
