#include "aiokv/transfer_ledger.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

// Calls visit(first, end) for each longest part of the list whose ids are consecutive.
template <class Visit>
void for_each_consecutive(std::span<const NodeId> nodes, Visit visit) {
    for (std::size_t i = 0; i < nodes.size();) {
        const std::size_t first = i++;
        while (i < nodes.size() && nodes[i] == nodes[i - 1] + 1) ++i;
        visit(nodes[first], nodes[i - 1] + 1);
    }
}

}  // namespace

// -- copies between the tiers ------------------------------------------------------------------

TransferId TransferLedger::begin(Transfer transfer) {
    ++last_;
    if (transfer.direction == Direction::kOnload) {
        for_each_consecutive(transfer.nodes, [this](NodeId first, NodeId end) {
            loading_.emplace(first, Loading{end, last_});
        });
    }
    transfers_.emplace(last_, std::move(transfer));
    return last_;
}

const Transfer& TransferLedger::get(TransferId id) const {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) {
        throw UsageError("no transfer " + std::to_string(id) + " is in flight");
    }
    return found->second;
}

Transfer TransferLedger::end(TransferId id) {
    const auto found = transfers_.find(id);
    if (found == transfers_.end()) {
        throw InternalError("transfer " + std::to_string(id) + " ended twice, or never began");
    }
    Transfer transfer = std::move(found->second);
    transfers_.erase(found);
    if (transfer.direction == Direction::kOnload) {
        for_each_consecutive(transfer.nodes, [this](NodeId first, auto) { loading_.erase(first); });
    }
    ++ended_;
    return transfer;
}

TransferId TransferLedger::onload_of(NodeId node) const {
    auto found = loading_.upper_bound(node);
    if (found == loading_.begin() || node >= (--found)->second.end) {
        throw InternalError("no onload writes node " + std::to_string(node));
    }
    return found->second.transfer;
}

void TransferLedger::leave(TransferId id, LeaseId lease) {
    Transfer& transfer = transfers_.at(id);
    std::erase(transfer.leases, lease);
    if (transfer.leases.empty()) abandoned_.push_back(id);
}

void TransferLedger::replace_lease(TransferId id, LeaseId from, LeaseId to) {
    if (const auto move = moves_.find(id); move != moves_.end()) {
        move->second.lease = to;
        return;
    }
    Transfer& transfer = transfers_.at(id);
    std::replace(transfer.leases.begin(), transfer.leases.end(), from, to);
    if (transfer.tail_owner == from) transfer.tail_owner = to;
}

void TransferLedger::mark_cancelling(TransferId id) {
    const auto found = transfers_.find(id);
    if (found != transfers_.end()) found->second.cancelling = true;
}

bool TransferLedger::is_saving() const {
    return std::any_of(transfers_.begin(), transfers_.end(), [](const auto& entry) {
        return entry.second.direction == Direction::kOffload;
    });
}

std::uint32_t TransferLedger::onloading_blocks() const {
    std::size_t blocks = 0;
    for (const auto& [id, transfer] : transfers_) {
        if (transfer.direction == Direction::kOnload) blocks += transfer.nodes.size();
    }
    return static_cast<std::uint32_t>(blocks);
}

TransferId TransferLedger::offload_of(NodeId node) const {
    for (const auto& [id, transfer] : transfers_) {
        if (transfer.direction != Direction::kOffload) continue;
        const std::vector<NodeId>& nodes = transfer.nodes;
        if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) return id;
    }
    return 0;
}

// -- moves of auxiliary ids ----------------------------------------------------------------------

TransferId TransferLedger::begin_move(Move move) {
    moves_.emplace(++last_, std::move(move));
    return last_;
}

const Move& TransferLedger::move(TransferId id) const {
    const auto found = moves_.find(id);
    if (found == moves_.end()) {
        throw UsageError("no auxiliary ids are moved by transfer " + std::to_string(id));
    }
    return found->second;
}

Move TransferLedger::end_move(TransferId id) {
    Move move = this->move(id);
    moves_.erase(id);
    return move;
}

void TransferLedger::orphan_move(TransferId id) {
    moves_.at(id).lease = 0;
    abandoned_.push_back(id);
}

// -- all -----------------------------------------------------------------------------------------

std::vector<TransferId> TransferLedger::take_abandoned() {
    std::vector<TransferId> ids;
    ids.swap(abandoned_);
    std::erase_if(ids, [this](TransferId id) {
        if (is_move(id)) return false;
        const auto found = transfers_.find(id);
        return found == transfers_.end() || !found->second.leases.empty();
    });
    return ids;
}

void TransferLedger::add_to(GroupStatistics& attention) const {
    for (const auto& [id, transfer] : transfers_) {
        const auto nodes = static_cast<std::uint32_t>(transfer.nodes.size());
        const auto tail = static_cast<std::uint32_t>(transfer.tail_blocks());
        const bool is_onload = transfer.direction == Direction::kOnload;
        attention.device.in_flight += (is_onload ? nodes : 0) + (transfer.orphaned ? tail : 0);
        attention.host.in_flight += is_onload ? tail : nodes + tail;
    }
}

void TransferLedger::check(Report& report) const {
    std::size_t onloading = 0;
    for (const auto& [first, loading] : loading_) {
        onloading += loading.end - first;
        report.require(transfers_.contains(loading.transfer), "I3: node ", first,
                       " is listed for transfer ", loading.transfer, ", which has ended");
    }
    report.require(onloading == onloading_blocks(), "I3: onloads write ", onloading_blocks(),
                   " blocks, ", onloading, " are listed");
    for (const auto& [id, transfer] : transfers_) {
        for (std::size_t i = transfer.nodes.size(); i < transfer.device_blocks.size(); ++i) {
            report.host.own(transfer.host_blocks[i], "a swapped tail");
            if (transfer.orphaned) report.device.own(transfer.device_blocks[i], "a swapped tail");
        }
        for (std::size_t i = 0; i < transfer.nodes.size(); ++i) {
            const Node& n = tree_[transfer.nodes[i]];
            ++report.pins[transfer.nodes[i]];
            report.require(tree_.is_live(transfer.nodes[i]), "I3: transfer ", id,
                           " holds a freed node");
            report.require(
                n.device == transfer.device_blocks[i] && n.host == transfer.host_blocks[i],
                "I3: transfer ", id, " block ", i, " changed under way");
        }
    }
}

}  // namespace aiokv
