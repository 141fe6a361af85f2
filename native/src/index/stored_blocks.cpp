#include "aiokv/stored_blocks.hpp"

#include <algorithm>
#include <span>
#include <string_view>

namespace aiokv {
namespace {

bool has_stored_blocks(const CoreConfig& config) {
    const bool has_state = config.state_slots == 0 || config.host_state_slots > 0;
    const bool has_windows =
        std::all_of(config.windows.begin(), config.windows.end(),
                    [](const WindowConfig& window) { return window.host_blocks > 0; });
    return config.stores.exist && config.host_blocks > 0 && has_state && has_windows;
}

std::size_t expected_nodes(const CoreConfig& config) {
    if (!has_stored_blocks(config)) return 1;
    return std::size_t{config.device_blocks} + config.host_blocks + 64;
}

}  // namespace

StoredBlocks::StoredBlocks(const CoreConfig& config, Index& index)
    : config_(config),
      exist_(has_stored_blocks(config)),
      index_(index),
      tree_(index.tree()),
      digests_(expected_nodes(config), 0, Pages::kSmall),
      flags_(expected_nodes(config), 0, Pages::kSmall) {}

void StoredBlocks::open(NodeId node) {
    if (tree_[node].has(kHasStoreEntry)) return;
    if (const std::size_t missing = std::size_t{node} + 1; missing > flags_.size()) {
        digests_.grow(missing - digests_.size());
        flags_.grow(missing - flags_.size());
    }
    flags_[node] = 0;
    tree_[node].set(kHasStoreEntry);
}

Digest StoredBlocks::digest_below(const Digest& parent, Tokens tokens, ItemKey items) const {
    const std::string_view bytes =
        items == kNoItems ? std::string_view() : tree_.item_keys().bytes(items);
    return block_digest(parent, tokens, bytes);
}

const Digest& StoredBlocks::digest(NodeId node) {
    unknown_.clear();
    for (NodeId up = node; !has(up, kDigestKnown); up = tree_.parent(up)) {
        unknown_.push_back(up);
        if (tree_[up].has(kRoot)) break;
    }
    while (!unknown_.empty()) {
        const NodeId next = unknown_.back();
        unknown_.pop_back();
        open(next);
        const Node& n = tree_[next];
        digests_[next] =
            n.has(kRoot)
                ? root_digest(config_.block_tokens, index_.context_of_root(next))
                : digest_below(digests_[tree_.parent(next)],
                               {tree_.tokens(next), config_.block_tokens}, tree_.items(next));
        set(next, kDigestKnown);
    }
    return digests_[node];
}

}  // namespace aiokv
