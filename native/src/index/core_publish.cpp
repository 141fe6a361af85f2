// Commit: what was computed becomes shareable.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

void Core::append(LeaseId id, Tokens tokens) {
    Lease& lease = lease_at(id);
    if (lease.tokens.size() + tokens.size() > lease.num_tokens) {
        throw LeaseError("cannot name " + str(tokens.size()) + " tokens after position " +
                         str(lease.tokens.size()) + ": the lease has " + str(lease.num_tokens) +
                         " positions");
    }
    lease.tokens.insert(lease.tokens.end(), tokens.begin(), tokens.end());
}

std::uint32_t Core::commit(LeaseId id, std::int64_t num_tokens, Step step) {
    Lease& lease = lease_at(id);
    if (!lease.granted) throw LeaseError("cannot commit a lease before it was allocated");
    if (lease.swap_out != 0) throw LeaseError("cannot commit a lease that is being swapped");
    if (num_tokens < 0 || num_tokens > lease.num_tokens) {
        throw LeaseError("cannot commit " + std::to_string(num_tokens) +
                         " positions of a lease that has " + str(lease.num_tokens));
    }
    const auto computed = static_cast<std::uint32_t>(num_tokens);
    if (!lease.windows.empty() && computed > reach_tokens(id)) {
        throw LeaseError("cannot commit " + std::to_string(num_tokens) +
                         " positions: the windows have blocks up to " + str(reach_tokens(id)) +
                         "; a step computes at most step_tokens");
    }
    if (lease.failed || computed <= lease.computed_tokens) return publish(lease);
    if (step > device_.finished_step()) {
        for (std::size_t i = lease.computed_tokens / config_.block_tokens; i < blocks_for(computed);
             ++i) {
            device_.use_in(lease.table[i], step);
        }
    }
    lease.computed_blocks += blocks_for(computed) - blocks_for(lease.computed_tokens);
    lease.computed_tokens = computed;
    lease.last_step = std::max(lease.last_step, step);
    const std::uint32_t published = publish(lease);
    if (!lease.windows.empty()) advance_windows(lease, step);
    return published;
}

// Index the computed, named, full blocks that are not indexed yet. Nothing is published before
// all that the lease was granted from other tiers has arrived: its own blocks depend on it.
std::uint32_t Core::publish(Lease& lease) {
    if (!lease.writes || lease.epoch != epoch_ || lease.failed) return 0;
    if (!lease.onloads.empty() || lease.swap_out != 0) return 0;
    const std::size_t known = std::min<std::size_t>(lease.computed_tokens, lease.tokens.size());
    const auto target = static_cast<std::uint32_t>(known / config_.block_tokens);
    const auto first = static_cast<std::uint32_t>(lease.path.size());
    if (first >= target && (first == 0 || !tree_[lease.path.back()].has(kDetached))) return 0;
    if (!shed_detached(lease)) return 0;
    const std::uint64_t before = counters_.published_blocks;
    NodeId node = lease.path.empty() ? root_of(lease) : lease.path.back();
    for (auto i = static_cast<std::uint32_t>(lease.path.size()); i < target; ++i) {
        node = publish_block(lease, node, i);
        lease.path.push_back(node);
    }
    if (!lease.snapshots.empty()) attach_snapshots(lease);
    if (!lease.windows.empty()) publish_windows(lease, first);
    announce(lease);
    ++version_;
    return static_cast<std::uint32_t>(counters_.published_blocks - before);
}

// First proof wins: where the block is indexed already, the lease's own copy stays private,
// unless the index has none on the device.
NodeId Core::publish_block(Lease& lease, NodeId parent, std::uint32_t index) {
    const std::int32_t* tokens = &lease.tokens[std::size_t{index} * config_.block_tokens];
    const auto [node, is_new] =
        tree_.find_or_add_child(parent, tokens, key_of(lease.item_keys, index));
    Node& n = tree_[node];
    if (n.refs++ == 0 && !is_new) dequeue(node);
    if (reuse_) n.reuse_class = reuse_->class_at(lease.classes, index);
    if (n.has(kDeviceResident)) return node;
    n.device = lease.table[index];
    n.set(kDeviceValid);
    tree_.count_device_child(node, +1);
    ++counters_.published_blocks;
    if (n.has(kHostValid)) note_twin(node);
    count_use(node);
    return node;
}

// Nodes below a failed onload are detached. Their ids become the lease's own again, so that what
// it recomputed can be published; not while another lease or a transfer still uses them.
bool Core::shed_detached(Lease& lease) {
    std::size_t first = lease.path.size();
    while (first > 0 && tree_[lease.path[first - 1]].has(kDetached)) --first;
    for (std::size_t i = first; i < lease.path.size(); ++i) {
        const Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i] && (node.refs > 1 || node.pins > 0)) return false;
    }
    for (std::size_t i = lease.path.size(); i-- > first;) {
        Node& node = tree_[lease.path[i]];
        if (node.device == lease.table[i]) {
            node.device = kNoBlock;
            node.clear(kDeviceResident);
        }
        unref(lease.path[i]);
    }
    lease.path.resize(first);
    return true;
}

// The first position to compute again after a failed onload, or -1 when none failed.
std::int64_t Core::recompute_from(LeaseId id) {
    Lease& lease = lease_at(id);
    if (!lease.failed) return -1;
    if (!lease.onloads.empty()) {
        throw LeaseError("transfers still write blocks of this lease; await layers.wait_all()");
    }
    if (has_sides()) {
        throw LeaseError(
            "recurrent state and windows cannot go back to what did arrive: preempt "
            "the lease, then resume it");
    }
    lease.failed = false;
    return lease.cached_tokens;
}

}  // namespace aiokv
