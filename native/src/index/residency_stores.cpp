// Host copies that fetches bring, and that saves read.
#include <algorithm>

#include "aiokv/residency.hpp"

namespace aiokv {

std::vector<BlockId> Residency::take_fetch_room(std::size_t blocks) {
    evict_host_until_free(blocks);
    make_host_room(blocks, 0);
    std::vector<BlockId> ids(std::min<std::size_t>(blocks, host_.free_blocks()));
    host_.take(ids);
    return ids;
}

bool Residency::give_host_copy(NodeId node, BlockId host) {
    Node& n = tree_[node];
    if (n.has(kHostValid | kHostLoading)) return false;
    n.host = host;
    gain(node, kHostValid);
    list_host_copy(node);
    return true;
}

void Residency::inherit_class(std::span<const NodeId> nodes) {
    if (!nodes.empty()) tree_.classify(nodes, tree_.run(tree_.parent(nodes.front())).reuse_class);
}

void Residency::enqueue_fetched(std::span<const NodeId> nodes) {
    for (std::size_t i = nodes.size(); i-- > 0;) evictable_.enqueue_block(nodes[i]);
}

void Residency::begin_save(std::span<const NodeId> nodes) {
    hold(nodes);
    for (const NodeId node : nodes) stored_.set(node, kSaving);
}

void Residency::finish_save(std::span<const NodeId> nodes) {
    for (const NodeId node : nodes) stored_.clear(node, kSaving);
    unhold(nodes);
}

std::vector<NodeId> Residency::next_on_host(std::size_t blocks) {
    std::vector<NodeId> nodes;
    for (NodeId node = evictable_.host_front(); node != kNone && nodes.size() < blocks;
         node = evictable_.after_on_host(node)) {
        nodes.push_back(node);
    }
    return nodes;
}

}  // namespace aiokv
