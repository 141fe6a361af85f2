// Sliding windows that come from a peer or go to one: the part of the table that is needed behind a
// position, and how a table moves there.
#include <algorithm>

#include "aiokv/sliding_windows.hpp"

namespace aiokv {

// Returns the first block of the window of the next position.
std::uint32_t SlidingWindows::first_needed(const WindowGroup& group,
                                           std::uint32_t num_tokens) const {
    const std::uint32_t seen = std::min(num_tokens, group.window_tokens - 1);
    return (num_tokens - seen) / config_.block_tokens;
}

std::vector<std::uint32_t> SlidingWindows::missing_blocks(const Lease& lease, std::size_t group,
                                                          std::uint32_t num_tokens) const {
    const std::uint32_t first = first_needed(groups_[group], num_tokens);
    std::vector<std::uint32_t> blocks;
    for (std::uint32_t i = lease.computed_tokens / config_.block_tokens;
         i < config_.blocks_for(num_tokens); ++i) {
        if (i >= first || groups_[group].is_sink(i)) blocks.push_back(i);
    }
    return blocks;
}

std::vector<std::uint32_t> SlidingWindows::needed_blocks(const Lease& lease,
                                                         std::size_t group) const {
    const std::uint32_t first = first_needed(groups_[group], lease.computed_tokens);
    std::vector<std::uint32_t> blocks;
    for (std::uint32_t i = 0; i < config_.blocks_for(lease.computed_tokens); ++i) {
        if (i >= first || groups_[group].is_sink(i)) blocks.push_back(i);
    }
    return blocks;
}

void SlidingWindows::move_to(Lease& lease, std::uint32_t num_tokens, Step step) {
    for (std::size_t g = 0; g < lease.windows.size(); ++g) {
        WindowGroup& group = groups_[g];
        WindowTable& window = lease.windows[g];
        const std::uint32_t first = first_needed(group, num_tokens);
        for (; window.first < std::min(first, window.end); ++window.first) {
            if (!group.is_sink(window.first)) drop(group, window, window.first, step);
        }
        if (window.end < first) {
            for (std::size_t i = window.end; i < first && group.is_sink(i); ++i) {
                window.table[i] = group.take();
            }
            window.first = window.end = first;
        }
        fill(group, window);
        window.received_tokens = num_tokens;
    }
}

}  // namespace aiokv
