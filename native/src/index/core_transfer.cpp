// Transfers: what a plan pins, and how its end becomes visible (I3, I4).
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"

namespace aiokv {

const Transfer& Core::transfer(TransferId id) const {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) {
        throw UsageError("no transfer " + std::to_string(id) + " is in flight");
    }
    return found->second;
}

void Core::start_onload(LeaseId id, Lease& lease, std::uint32_t first_host_block) {
    const TransferId transfer_id = ++last_transfer_;
    Transfer& transfer = transfers_[transfer_id];
    transfer.leases.push_back(id);
    for (std::size_t i = first_host_block; i < lease.path.size(); ++i) {
        const NodeId node = lease.path[i];
        Node& n = tree_[node];
        n.device = lease.table[i];
        ++device_nodes_;
        n.set(kDeviceLoading);
        n.next = transfer_id;
        ++n.pins;
        tree_.count_device_child(node, +1);
        transfer.nodes.push_back(node);
        transfer.device_blocks.push_back(n.device);
        transfer.host_blocks.push_back(n.host);
    }
    if (!lease.tail_host.empty()) {
        transfer.tail_owner = id;
        for (std::size_t i = 0; i < lease.tail_host.size(); ++i) {
            transfer.device_blocks.push_back(lease.table[lease.path.size() + i]);
            transfer.host_blocks.push_back(lease.tail_host[i]);
        }
        lease.tail_host.clear();
    }
    for (const BlockId block : transfer.device_blocks) {
        transfer.after_step = std::max(transfer.after_step, device_.after_step(block));
    }
    lease.onloads.push_back(transfer_id);
    ++version_;
}

// Blocks before `first_bad_block` are proven when the transfer failed.
void Core::complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block) {
    if (is_state_move(id)) return finish_move(id, outcome);
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) {
        throw InternalError("transfer " + std::to_string(id) + " ended twice, or never began");
    }
    Transfer transfer = std::move(found->second);
    transfers_.erase(found);
    ++ended_transfers_;
    const auto nodes = static_cast<std::uint32_t>(transfer.nodes.size());
    const auto blocks = static_cast<std::uint32_t>(transfer.device_blocks.size());
    const std::uint32_t good = outcome == Outcome::kDone     ? blocks
                               : outcome == Outcome::kFailed ? std::min(first_bad_block, blocks)
                                                             : 0;
    if (transfer.direction == Direction::kOffload) {
        finish_offload(transfer, std::min(good, nodes));
    } else if (outcome == Outcome::kCancelled && transfer.leases.empty()) {
        cancel_onload(transfer);
    } else {
        finish_onload(transfer, std::min(good, nodes));
    }
    finish_tail(transfer, good);
    if (transfer.direction == Direction::kOnload) settle_leases(id, transfer);
    ++version_;
}

void Core::finish_onload(Transfer& transfer, std::uint32_t good) {
    const std::vector<NodeId>& nodes = transfer.nodes;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        Node& n = tree_[nodes[i]];
        --n.pins;
        n.next = kNone;
        if (i >= good) continue;  // stays resident, not valid, until it is dropped below
        n.clear(kDeviceLoading);
        n.set(kDeviceValid);
        note_twin(nodes[i]);
    }
    counters_.onloaded_blocks += good;
    counters_.failed_blocks += nodes.size() - good;
    const bool failed = good < nodes.size();
    if (failed) {
        fail_leases(transfer, nodes[good]);
        if (!tree_[nodes[good]].has(kDetached)) drop(nodes[good]);
    }
    for (std::size_t i = nodes.size(); i-- > 0;) {
        const Node& n = tree_[nodes[i]];
        if (i >= good && !tree_.is_live(nodes[i])) continue;  // dropped and freed
        if (n.has(kDetached)) {
            free_if_unowned(nodes[i]);
        } else if (n.refs == 0) {
            enqueue(nodes[i]);
        }
    }
}

// No lease waits for it any more: the blocks stay host blocks.
void Core::cancel_onload(Transfer& transfer) {
    for (std::size_t i = transfer.nodes.size(); i-- > 0;) {
        const NodeId node = transfer.nodes[i];
        Node& n = tree_[node];
        --n.pins;
        n.next = kNone;
        if (n.has(kDetached)) {
            free_if_unowned(node);
            continue;
        }
        // A lease that computed the same block meanwhile has put its refs, and perhaps a child,
        // on this copy. Without it the path would have a hole; that lease publishes its own.
        if (n.refs > 0 || tree_.has_device_child(node)) {
            drop(node);
            continue;
        }
        device_.give_back(n.device);
        n.device = kNoBlock;
        --device_nodes_;
        n.clear(kDeviceLoading);
        tree_.count_device_child(node, -1);
        enqueue(node);
        unpark_if_free(n.parent);
    }
}

void Core::finish_offload(Transfer& transfer, std::uint32_t good) {
    for (std::size_t i = transfer.nodes.size(); i-- > 0;) {
        const NodeId node = transfer.nodes[i];
        Node& n = tree_[node];
        --n.pins;
        n.clear(kHostLoading);
        if (i < good) {
            n.set(kHostValid);
            note_twin(node);
        } else {
            n.set(kBackupFailed);
            host_.give_back(n.host);
            n.host = kNoBlock;
        }
        if (n.has(kDetached)) {
            free_if_unowned(node);
        } else {
            unpark_if_free(node);
        }
    }
    counters_.offloaded_blocks += good;
    counters_.failed_blocks += transfer.nodes.size() - good;
}

// cached_tokens of every lease that joined falls to its first bad block.
void Core::fail_leases(const Transfer& transfer, NodeId first_bad) {
    std::size_t depth = 0;  // of the node, which is the same in every path
    for (const LeaseId id : transfer.leases) {
        Lease& lease = lease_at(id);
        if (depth >= lease.path.size() || lease.path[depth] != first_bad) {
            const auto bad = std::find(lease.path.begin(), lease.path.end(), first_bad);
            if (bad == lease.path.end()) continue;
            depth = static_cast<std::size_t>(bad - lease.path.begin());
        }
        fail_lease(lease, static_cast<std::uint32_t>(depth));
    }
}

void Core::fail_lease(Lease& lease, std::uint32_t good_blocks) {
    // The blocks of a cut item that did arrive are written once more: an encoder makes it whole.
    good_blocks = static_cast<std::uint32_t>(before_cut_item(lease, good_blocks));
    if (has_sides()) {  // they have gone on, or never came: nothing can be gone on from
        good_blocks = 0;
        forget_snapshots(lease, 0);
    }
    lease.cached_tokens = std::min(lease.cached_tokens, good_blocks * config_.block_tokens);
    lease.computed_tokens = std::min(lease.computed_tokens, lease.cached_tokens);
    lease.failed = true;
    withdraw(lease);
}

void Core::settle_leases(TransferId id, const Transfer& transfer) {
    for (const LeaseId lease_id : transfer.leases) {
        Lease& lease = lease_at(lease_id);
        std::erase(lease.onloads, id);
        if (lease.onloads.empty()) publish(lease);
    }
}

void Core::leave_onloads(LeaseId id, Lease& lease, Step step) {
    for (const TransferId transfer_id : lease.onloads) {
        if (is_state_move(transfer_id)) {
            orphan_move(moves_.at(transfer_id), step);
            abandoned_.push_back(transfer_id);
            continue;
        }
        Transfer& transfer = transfers_.at(transfer_id);
        if (transfer.tail_owner == id) orphan_tail(transfer, step);
        std::erase(transfer.leases, id);
        if (transfer.leases.empty()) abandoned_.push_back(transfer_id);
    }
    lease.onloads.clear();
}

// Onloads whose last lease was released: worth cancelling where they have not begun.
std::vector<TransferId> Core::take_abandoned() {
    std::vector<TransferId> ids;
    ids.swap(abandoned_);
    std::erase_if(ids, [this](TransferId id) {
        if (is_state_move(id)) return false;
        const auto found = transfers_.find(id);
        return found == transfers_.end() || !found->second.leases.empty();
    });
    return ids;
}

void Core::mark_cancelling(TransferId id) {
    const auto found = transfers_.find(id);
    if (found != transfers_.end()) found->second.cancelling = true;
}

}  // namespace aiokv
