#include "aiokv/peer_transfers.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

// Adds positions to the ranges, which stay in order, apart from each other and not adjacent.
void add_range(std::vector<TokenRange>& ranges, TokenRange added) {
    const auto from = std::find_if(ranges.begin(), ranges.end(), [&](const TokenRange& range) {
        return range.end >= added.first;
    });
    auto to = from;
    for (; to != ranges.end() && to->first <= added.end; ++to) {
        added.first = std::min(added.first, to->first);
        added.end = std::max(added.end, to->end);
    }
    ranges.insert(ranges.erase(from, to), added);
}

void remove_range(std::vector<TokenRange>& ranges, TokenRange removed) {
    std::vector<TokenRange> left;
    for (const TokenRange& range : ranges) {
        const TokenRange before = {range.first, std::min(range.end, removed.first)};
        const TokenRange behind = {std::max(range.first, removed.end), range.end};
        if (before.first < before.end) left.push_back(before);
        if (behind.first < behind.end) left.push_back(behind);
    }
    ranges = std::move(left);
}

}  // namespace

// -- begin -----------------------------------------------------------------------------------

void PeerTransfers::check_ready(const Lease& lease, const char* verb, std::int64_t first_block,
                                std::int64_t num_blocks) const {
    if (!lease.is(LeaseState::kGranted)) {
        throw LeaseError(std::string(verb) + ": the lease is " + name_of(lease.state) +
                         "; it must be allocated, and stay on the device")
            .of(lease.id())
            .hint("call allocate first");
    }
    if (!lease.onloads.empty()) {
        throw LeaseError(std::string(verb) + ": onloads still write blocks of the lease")
            .of(lease.id())
            .hint("await layers.wait_all() first");
    }
    if (!index_.is_of_epoch(lease)) {
        throw LeaseError(std::string(verb) +
                         ": the cache was reset after the lease was allocated; its blocks may be "
                         "those of other weights")
            .of(lease.id())
            .hint("preempt the lease, then resume it");
    }
    const auto total = static_cast<std::int64_t>(lease.table.size());
    if (first_block < 0 || num_blocks < 1 || num_blocks > total - first_block) {
        throw UsageError(std::string(verb) + ": " + std::to_string(num_blocks) +
                         " blocks from block " + std::to_string(first_block) +
                         " on are not inside the table of " + std::to_string(total) + " blocks")
            .of(lease.id());
    }
}

TransferId PeerTransfers::receive(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                                  std::int64_t num_blocks) {
    check_ready(lease, "receive", first_block, num_blocks);
    const auto first = static_cast<std::uint32_t>(first_block);
    const auto blocks = static_cast<std::uint32_t>(num_blocks);
    const std::uint32_t computed = config_.blocks_for(lease.computed_tokens);
    // After a failed onload, other leases may have the device blocks of the path, too.
    if (first < computed || first < lease.path.size()) {
        throw LeaseError("receive: block " + str(first) +
                         " has computed positions, or is shared; "
                         "the first block that can be received is " +
                         str(std::max<std::size_t>(computed, lease.path.size())))
            .of(lease.id());
    }
    if (first + blocks > config_.blocks_for(lease.tokens.size())) {
        throw LeaseError("receive: " + str(blocks) + " blocks from block " + str(first) +
                         " on have positions without tokens; the lease names the tokens of " +
                         str(lease.tokens.size()) + " positions")
            .of(lease.id())
            .hint("call append first");
    }
    if (lease.batches > 0) {
        throw LeaseError("receive: a batch computes with the lease")
            .of(lease.id())
            .hint("let the batch end first");
    }
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& other = in_flight_.at(id);
        if (!other.receives() || other.end_block() <= first) continue;
        if (other.first_block >= first + blocks) continue;
        throw LeaseError("receive: blocks " + str(other.first_block) + " to " +
                         str(other.end_block() - 1) + " are being received already")
            .of(lease.id());
    }
    remove_range(lease.received,
                 {first * config_.block_tokens, (first + blocks) * config_.block_tokens});
    return begin(lease, PeerRoute::kReceive, ticket, first, blocks);
}

TransferId PeerTransfers::send(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                               std::int64_t num_blocks) {
    check_ready(lease, "send", first_block, num_blocks);
    const std::uint32_t computed = config_.blocks_for(lease.computed_tokens);
    if (first_block + num_blocks > static_cast<std::int64_t>(computed)) {
        throw LeaseError("send: " + std::to_string(num_blocks) + " blocks from block " +
                         std::to_string(first_block) + " on: only " + str(computed) +
                         " blocks are computed")
            .of(lease.id())
            .hint("commit the positions first");
    }
    return begin(lease, PeerRoute::kSend, ticket, static_cast<std::uint32_t>(first_block),
                 static_cast<std::uint32_t>(num_blocks));
}

TransferId PeerTransfers::begin(Lease& lease, PeerRoute route, const TicketId& ticket,
                                std::uint32_t first_block, std::uint32_t num_blocks) {
    const auto from = lease.table.begin() + static_cast<std::ptrdiff_t>(first_block);
    PeerTransfer transfer;
    transfer.route = route;
    transfer.ticket = ticket;
    transfer.lease = lease.id();
    transfer.first_block = first_block;
    transfer.kept_blocks = num_blocks;
    transfer.end_token = static_cast<std::uint32_t>(lease.tokens.size());
    transfer.blocks.assign(from, from + static_cast<std::ptrdiff_t>(num_blocks));
    transfer.holders.push_back(lease.id());
    for (const BlockId block : transfer.blocks) {
        transfer.after_step = std::max(transfer.after_step, device_.after_step(block));
    }
    if (transfer.receives() && lease.last_step > device_.finished_step()) {
        transfer.after_step = std::max(transfer.after_step, lease.last_step);
    }
    const TransferId id = transfers_.begin_peer_transfer();
    in_flight_.emplace(id, std::move(transfer));
    lease.peer_transfers.push_back(id);
    ++counts(route).begun;
    return id;
}

const PeerTransfer& PeerTransfers::get(TransferId id) const {
    const auto found = in_flight_.find(id);
    if (found == in_flight_.end()) {
        throw UsageError("no transfer " + str(id) + " from or to a peer is in flight");
    }
    return found->second;
}

// -- end -------------------------------------------------------------------------------------

void PeerTransfers::give_up(TransferId id, PeerTransfer& transfer) {
    if (std::exchange(transfer.cancelling, true)) return;
    abandoned_.push_back(id);
}

void PeerTransfers::end_ticket(const Lease& lease, const TicketId& ticket) {
    for (const TransferId id : lease.peer_transfers) {
        PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.ticket == ticket) give_up(id, transfer);
    }
}

void PeerTransfers::end_all() {
    std::vector<TransferId> ids;
    for (const auto& [id, transfer] : in_flight_) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    for (const TransferId id : ids) give_up(id, in_flight_.at(id));
}

std::vector<LeaseId> PeerTransfers::complete(TransferId id, Outcome outcome,
                                             std::uint32_t first_bad_block) {
    const PeerTransfer transfer = std::move(in_flight_.extract(id).mapped());
    transfers_.end_peer_transfer();
    const auto blocks = static_cast<std::uint32_t>(transfer.blocks.size());
    std::uint32_t good = outcome == Outcome::kDone     ? blocks
                         : outcome == Outcome::kFailed ? std::min(first_bad_block, blocks)
                                                       : 0;
    counts(transfer.route).blocks += good;
    counts(transfer.route).failed += outcome == Outcome::kFailed;
    if (transfer.receives()) good = std::min(good, transfer.kept_blocks);
    std::vector<LeaseId> ended;
    for (const LeaseId holder : transfer.holders) {
        Lease& lease = leases_.at(holder);
        std::erase(lease.peer_transfers, id);
        if (lease.is(LeaseState::kReleasing) && !lease.is_in_use()) ended.push_back(holder);
    }
    if (transfer.lease == 0) return ended;
    if (transfer.receives() && good > 0) {
        const std::uint32_t first = transfer.first_block * config_.block_tokens;
        const std::uint32_t end = first + good * config_.block_tokens;
        Lease& lease = leases_.at(transfer.lease);
        add_range(lease.received, {first, std::min({end, transfer.end_token, lease.num_tokens})});
    }
    ends_.push_back({id, transfer.lease, good});
    return ended;
}

std::vector<PeerEnd> PeerTransfers::take_ends() {
    return std::exchange(ends_, {});
}

std::vector<TransferId> PeerTransfers::take_abandoned() {
    std::vector<TransferId> ids = std::exchange(abandoned_, {});
    std::erase_if(ids, [this](TransferId id) { return !has(id); });
    return ids;
}

// -- other transitions of the lease ------------------------------------------------------------

std::optional<std::uint32_t> PeerTransfers::first_receiving(const Lease& lease) const {
    std::optional<std::uint32_t> first;
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (!transfer.receives() || transfer.kept_blocks == 0) continue;
        first = std::min(first.value_or(transfer.first_block), transfer.first_block);
    }
    return first;
}

void PeerTransfers::check_computed(const Lease& lease, std::int64_t num_tokens) const {
    const std::optional<std::uint32_t> first = first_receiving(lease);
    if (!first || num_tokens <= static_cast<std::int64_t>(*first) * config_.block_tokens) return;
    throw LeaseError("commit: num_tokens is " + std::to_string(num_tokens) +
                     ", but positions from " + str(std::uint64_t{*first} * config_.block_tokens) +
                     " on are still being received")
        .of(lease.id())
        .hint("wait for the end of the receive first");
}

void PeerTransfers::check_compute(const Lease& lease) const {
    const std::optional<std::uint32_t> first = first_receiving(lease);
    if (!first) return;
    throw LeaseError("computing: positions of a lease from " +
                     str(std::uint64_t{*first} * config_.block_tokens) +
                     " on are still being received")
        .of(lease.id())
        .hint("wait for the end of the receive first");
}

void PeerTransfers::check_swap(const Lease& lease) const {
    if (lease.peer_transfers.empty()) return;
    throw LeaseError("preempt: transfers between the lease and a peer are in flight")
        .of(lease.id())
        .hint("end the receive or the send first, or preempt without swap");
}

void PeerTransfers::check_truncate(const Lease& lease, std::int64_t num_tokens) const {
    if (num_tokens < 0 || num_tokens >= lease.num_tokens) return;
    const auto length = static_cast<std::uint32_t>(num_tokens);
    if (length % config_.block_tokens == 0) return;
    const std::uint32_t cut = length / config_.block_tokens;
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (cut < transfer.first_block || cut >= transfer.first_block + transfer.kept_blocks) {
            continue;
        }
        if (!transfer.receives() && length >= lease.computed_tokens) continue;
        throw LeaseError("truncate to " + str(length) + " positions: block " + str(cut) +
                         " would be cut, and a transfer between the lease and a peer uses it")
            .of(lease.id())
            .hint("end the receive or the send first, or truncate to a multiple of block_tokens");
    }
}

bool PeerTransfers::use_behind(const Lease& lease, std::size_t blocks) const {
    return std::any_of(lease.peer_transfers.begin(), lease.peer_transfers.end(),
                       [&](TransferId id) {
                           const PeerTransfer& transfer = in_flight_.at(id);
                           return transfer.first_block + transfer.kept_blocks > blocks;
                       });
}

void PeerTransfers::abandon(Lease& lease) {
    for (const TransferId id : lease.peer_transfers) {
        PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.lease == lease.id()) transfer.lease = 0;
        give_up(id, transfer);
    }
}

void PeerTransfers::hand_over(Lease& lease, Lease& keeper) {
    abandon(lease);
    keeper.peer_transfers = std::exchange(lease.peer_transfers, {});
    for (const TransferId id : keeper.peer_transfers) {
        std::vector<LeaseId>& holders = in_flight_.at(id).holders;
        std::replace(holders.begin(), holders.end(), lease.id(), keeper.id());
    }
}

void PeerTransfers::cut(Lease& lease, std::size_t blocks, Lease& keeper) {
    for (const TransferId id : lease.peer_transfers) {
        PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.first_block + transfer.kept_blocks <= blocks) continue;
        transfer.kept_blocks = static_cast<std::uint32_t>(blocks) -
                               std::min(transfer.first_block, static_cast<std::uint32_t>(blocks));
        transfer.holders.push_back(keeper.id());
        keeper.peer_transfers.push_back(id);
        if (transfer.receives() && transfer.kept_blocks == 0) give_up(id, transfer);
    }
}

// -- statistics and checks ---------------------------------------------------------------------

void PeerTransfers::add_to(CoreStatistics& statistics) const {
    const Counts& received = counts(PeerRoute::kReceive);
    const Counts& sent = counts(PeerRoute::kSend);
    statistics.receives = received.begun;
    statistics.received_blocks = received.blocks;
    statistics.failed_receives = received.failed;
    statistics.sends = sent.begun;
    statistics.sent_blocks = sent.blocks;
    statistics.failed_sends = sent.failed;
}

void PeerTransfers::check_transfer(Report& report, TransferId id,
                                   const PeerTransfer& transfer) const {
    const auto is_open = [this](LeaseId lease) { return leases_.is_open(lease); };
    report.require(!transfer.holders.empty() &&
                       std::all_of(transfer.holders.begin(), transfer.holders.end(), is_open),
                   "I3: transfer ", id, " of a peer has a holder that has ended");
    for (const LeaseId holder : transfer.holders) {
        if (!is_open(holder)) continue;
        const std::vector<TransferId>& listed = leases_.at(holder).peer_transfers;
        report.require(std::count(listed.begin(), listed.end(), id) == 1,
                       "I3: a holder of transfer ", id, " of a peer does not list it");
    }
    if (transfer.lease == 0) return;
    report.require(transfer.holders.front() == transfer.lease && is_open(transfer.lease) &&
                       leases_.at(transfer.lease).is(LeaseState::kGranted),
                   "I3: the lease of transfer ", id, " of a peer does not have its blocks");
    if (!is_open(transfer.lease)) return;
    const Lease& lease = leases_.at(transfer.lease);
    for (std::uint32_t i = 0; i < transfer.kept_blocks; ++i) {
        const std::size_t block = transfer.first_block + i;
        report.require(block < lease.table.size() && lease.table[block] == transfer.blocks[i],
                       "I3: block ", i, " of transfer ", id, " of a peer changed under way");
    }
    const std::uint64_t start = std::uint64_t{transfer.first_block} * config_.block_tokens;
    report.require(
        !transfer.receives() || transfer.kept_blocks == 0 || lease.computed_tokens <= start,
        "I11: ", lease.computed_tokens, " positions are computed, but those from ", start,
        " on are being received");
}

// I11 from scratch: a block that is being received is in no node of the index, not free, and in the
// table of one lease only, which is a holder. A block that is being sent is in the table of a
// holder, so it is neither free nor evictable.
void PeerTransfers::check(Report& report) const {
    std::vector<std::uint8_t> indexed(device_.capacity(), 0);
    const PrefixTree& tree = index_.tree();
    for (NodeId node = 0; node < tree.end_id(); ++node) {
        const Node& n = tree[node];
        if (!tree.is_live(node) || n.has(kRoot) || n.device == kNoBlock) continue;
        indexed[static_cast<std::size_t>(n.device)] = 1;
    }
    std::unordered_map<BlockId, std::vector<LeaseId>> tables;
    std::size_t listed = 0;
    for (const Lease& lease : leases_) {
        listed += lease.peer_transfers.size();
        for (const BlockId block : lease.table) tables[block].push_back(lease.id());
        report.require(lease.has_blocks() || lease.peer_transfers.empty(),
                       "I3: a lease without blocks has transfers of peers");
        report.require(lease.has_blocks() || lease.received.empty(),
                       "I4: a lease without blocks has received some");
        std::uint64_t end = lease.computed_tokens;
        for (const TokenRange& range : lease.received) {
            report.require(
                range.first >= end && range.first < range.end && range.end <= lease.num_tokens,
                "I4: positions ", range.first, " to ", range.end, " are noted as received");
            end = std::uint64_t{range.end} + 1;
        }
    }
    std::size_t holders = 0;
    for (const auto& [id, transfer] : in_flight_) {
        holders += transfer.holders.size();
        check_transfer(report, id, transfer);
        for (const BlockId block : transfer.blocks) {
            const std::vector<LeaseId>& having = tables[block];
            const auto is_holder = [&](LeaseId lease) {
                const std::vector<LeaseId>& all = transfer.holders;
                return std::find(all.begin(), all.end(), lease) != all.end();
            };
            report.require(!device_.is_free(block), "I3: block ", block, " of transfer ", id,
                           " of a peer is free");
            report.require(std::any_of(having.begin(), having.end(), is_holder),
                           "I3: no holder of ", "transfer ", id, " of a peer has block ", block);
            if (!transfer.receives()) continue;
            report.require(having.size() == 1, "I11: ", having.size(), " leases have block ", block,
                           ", which is being received");
            report.require(indexed[static_cast<std::size_t>(block)] == 0, "I11: block ", block,
                           " is indexed, and is being received");
        }
    }
    report.require(listed == holders, "I3: leases list ", listed, " transfers of peers of ",
                   holders);
}

}  // namespace aiokv
