#include "aiokv/peer_transfers.hpp"

#include <algorithm>
#include <numeric>
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

LeaseError in_flight(const Lease& lease, const char* verb, bool receives) {
    LeaseError error(std::string(verb) + ": the recurrent state or a window of a lease is being " +
                     (receives ? "received" : "sent"));
    return error.of(lease.id()).hint("wait for the end of the transfer first");
}

// Returns the lease's id for a block of the prompt (for a state: its slot), or kNoBlock.
BlockId id_of(const Lease& lease, GroupId group, std::size_t block) {
    if (group == kRecurrentState) return lease.recurrent.slot;
    const auto number = static_cast<std::size_t>(group);
    const std::vector<BlockId>* table = group == kAttention ? &lease.table : nullptr;
    if (group >= 0 && number < lease.windows.size()) table = &lease.windows[number].table;
    return table != nullptr && block < table->size() ? (*table)[block] : kNoBlock;
}

}  // namespace

// -- begin -----------------------------------------------------------------------------------

void PeerTransfers::check_ready(const Lease& lease, const char* verb) const {
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
}

TransferId PeerTransfers::receive(Lease& lease, const TicketId& ticket, std::int64_t num_tokens,
                                  GroupId group, std::int64_t first_block, Step step) {
    if (group != kAttention) return receive_group(lease, ticket, group, num_tokens, step);
    return receive_blocks(lease, ticket, blocks_of(lease, "receive", first_block, num_tokens));
}

TransferId PeerTransfers::send(Lease& lease, const TicketId& ticket, std::int64_t num_tokens,
                               GroupId group, std::int64_t first_block, LayerRanges layers,
                               std::uint64_t mark, Step step) {
    if (group != kAttention) return send_group(lease, ticket, group, num_tokens);
    const BlockRange range = blocks_of(lease, "send", first_block, num_tokens);
    if (mark != 0) return send_early(lease, ticket, range, layers, mark, step);
    return send_blocks(lease, ticket, range, layers);
}

BlockRange PeerTransfers::blocks_of(const Lease& lease, const char* verb, std::int64_t first_block,
                                    std::int64_t num_tokens) const {
    check_ready(lease, verb);
    const auto total = static_cast<std::int64_t>(lease.table.size());
    const std::int64_t size = config_.block_tokens;
    const std::int64_t end = num_tokens / size + (num_tokens % size > 0);
    if (first_block < 0 || end <= first_block || end > total) {
        throw UsageError(std::string(verb) + ": the blocks from block " +
                         std::to_string(first_block) + " to position " +
                         std::to_string(num_tokens) + " are not inside the table of " +
                         std::to_string(total) + " blocks")
            .of(lease.id());
    }
    return {static_cast<std::uint32_t>(first_block), static_cast<std::uint32_t>(end)};
}

TransferId PeerTransfers::receive_blocks(Lease& lease, const TicketId& ticket, BlockRange range) {
    const std::uint32_t computed = config_.blocks_for(lease.computed_tokens);
    // After a failed onload, other leases may share the device blocks of the path.
    if (range.first < computed || range.first < lease.path.size()) {
        throw LeaseError("receive: block " + str(range.first) +
                         " has computed positions, or is shared; "
                         "the first block that can be received is " +
                         str(std::max<std::size_t>(computed, lease.path.size())))
            .of(lease.id());
    }
    check_no_side(lease, "receive");
    if (range.end > config_.blocks_for(lease.tokens.size())) {
        throw LeaseError("receive: blocks " + str(range.first) + " to " + str(range.end - 1) +
                         " have positions without tokens; the lease names the tokens of " +
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
        if (!other.overlaps(range)) continue;
        if (!other.receives && !other.is_early) continue;
        throw LeaseError("receive: blocks " + str(other.first_block()) + " to " +
                         str(other.end_block() - 1) +
                         (other.is_early ? " are being sent" : " are being received already"))
            .of(lease.id());
    }
    remove_range(lease.received,
                 {range.first * config_.block_tokens, range.end * config_.block_tokens});
    return begin(lease, of_blocks(lease, ticket, range, true));
}

TransferId PeerTransfers::send_blocks(Lease& lease, const TicketId& ticket, BlockRange range,
                                      LayerRanges layers) {
    const std::uint32_t computed = config_.blocks_for(lease.computed_tokens);
    if (range.end > computed) {
        throw LeaseError("send: blocks " + str(range.first) + " to " + str(range.end - 1) +
                         ": only " + str(computed) + " blocks are computed")
            .of(lease.id())
            .hint("commit the positions first");
    }
    PeerTransfer transfer = of_blocks(lease, ticket, range, false);
    transfer.layers = layers;
    return begin(lease, std::move(transfer));
}

TransferId PeerTransfers::send_early(Lease& lease, const TicketId& ticket, BlockRange range,
                                     LayerRanges layers, std::uint64_t mark, Step step) {
    if (layers.first >= layers.end) {
        throw UsageError("send: the ranges of layers of a mark are " + str(layers.first) + " to " +
                         str(layers.end) + "; at least one must be sent")
            .of(lease.id());
    }
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& other = in_flight_.at(id);
        if (!other.receives || other.kept_blocks == 0 || !other.overlaps(range)) continue;
        throw LeaseError("send: blocks " + str(other.first_block()) + " to " +
                         str(other.end_block() - 1) + " are being received")
            .of(lease.id());
    }
    PeerTransfer transfer = of_blocks(lease, ticket, range, false);
    transfer.layers = layers;
    transfer.is_early = true;
    transfer.mark = mark;
    transfer.after_step = step > device_.finished_step() ? step : 0;
    return begin(lease, std::move(transfer));
}

PeerTransfer PeerTransfers::of_blocks(const Lease& lease, const TicketId& ticket, BlockRange range,
                                      bool receives) const {
    PeerTransfer transfer;
    transfer.receives = receives;
    transfer.ticket = ticket;
    transfer.kept_blocks = range.end - range.first;
    transfer.end_token = static_cast<std::uint32_t>(lease.tokens.size());
    transfer.ids.assign(lease.table.begin() + range.first, lease.table.begin() + range.end);
    transfer.blocks.resize(transfer.ids.size());
    std::iota(transfer.blocks.begin(), transfer.blocks.end(), range.first);
    for (const BlockId id : transfer.ids) {
        transfer.after_step = std::max(transfer.after_step, device_.after_step(id));
    }
    if (receives) transfer.after_step = after_use(lease, transfer.after_step);
    return transfer;
}

// Returns `step`, or the newest step that computed with the lease.
Step PeerTransfers::after_use(const Lease& lease, Step step) const {
    return lease.last_step > device_.finished_step() ? std::max(step, lease.last_step) : step;
}

TransferId PeerTransfers::begin(Lease& lease, PeerTransfer transfer) {
    transfer.lease = lease.id();
    transfer.holders.push_back(lease.id());
    ++counts(transfer).begun;
    const TransferId id = transfers_.begin_other();
    in_flight_.emplace(id, std::move(transfer));
    lease.peer_transfers.push_back(id);
    return id;
}

// -- groups whose blocks are needed behind one position only --------------------------------------

// State and windows belong to one position, so they are moved only while no batch can change it.
void PeerTransfers::check_group(const Lease& lease, const char* verb, GroupId group) const {
    if (group == kRecurrentState && config_.state_slots == 0) {
        throw UsageError(std::string(verb) + ": the model has no recurrent state; state_slots is 0")
            .of(lease.id())
            .field("state_slots");
    }
    check_ready(lease, verb);
    if (lease.batches > 0) {
        throw LeaseError(std::string(verb) + ": a batch computes with the lease")
            .of(lease.id())
            .hint("let the batch end first");
    }
    if (group == kRecurrentState && lease.recurrent.slot == kNoBlock) {
        throw LeaseError(std::string(verb) + ": the lease computes nothing, and has no state slot")
            .of(lease.id());
    }
    if (group >= static_cast<GroupId>(lease.windows.size()) || group < kRecurrentState) {
        throw UsageError(std::string(verb) + ": there is no window group " + std::to_string(group) +
                         "; the lease has " + str(lease.windows.size()))
            .of(lease.id())
            .field("windows");
    }
}

void PeerTransfers::check_received(const Lease& lease, std::int64_t num_tokens) const {
    const std::uint32_t end = lease.end_of_received();
    if (num_tokens > static_cast<std::int64_t>(lease.computed_tokens) &&
        num_tokens <= static_cast<std::int64_t>(end)) {
        return;
    }
    throw LeaseError("receive: num_tokens is " + std::to_string(num_tokens) +
                     ", but the lease has computed " + str(lease.computed_tokens) +
                     " positions, and received those before " + str(end))
        .of(lease.id())
        .hint("receive the blocks first");
}

TransferId PeerTransfers::receive_group(Lease& lease, const TicketId& ticket, GroupId group,
                                        std::int64_t num_tokens, Step step) {
    check_group(lease, "receive", group);
    check_received(lease, num_tokens);
    const auto tokens = static_cast<std::uint32_t>(num_tokens);
    if (group == kRecurrentState) {
        check_no_side(lease, "receive");
        check_windows(lease, "receive", num_tokens);
        return begin_group(lease, ticket, group, {0}, tokens, true);
    }
    const std::uint32_t behind = lease.windows.front().received_tokens;
    if (behind != 0 && behind != tokens) {
        throw LeaseError("receive: num_tokens is " + str(tokens) +
                         ", but windows behind position " + str(behind) +
                         " are being received already")
            .of(lease.id());
    }
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& other = in_flight_.at(id);
        const bool is_beside = other.moves_attention() || (other.receives && other.group >= 0);
        if (!is_beside || other.group == group) throw in_flight(lease, "receive", other.receives);
    }
    if (behind == 0) windows_.move_to(lease, tokens, lease.last_use(step));
    for (WindowTable& table : lease.windows) table.received_ticket = ticket;
    return begin_group(lease, ticket, group,
                       windows_.missing_blocks(lease, static_cast<std::size_t>(group), tokens),
                       tokens, true);
}

TransferId PeerTransfers::send_group(Lease& lease, const TicketId& ticket, GroupId group,
                                     std::int64_t num_tokens) {
    check_group(lease, "send", group);
    if (group == kRecurrentState) {
        check_state_copy(lease, "send");
    } else {
        check_windows(lease, "send", lease.computed_tokens);
    }
    if (num_tokens != static_cast<std::int64_t>(lease.computed_tokens) || num_tokens == 0) {
        throw LeaseError("send: num_tokens is " + std::to_string(num_tokens) +
                         "; the lease has computed " + str(lease.computed_tokens) + " positions")
            .of(lease.id())
            .hint("commit exactly these positions first");
    }
    std::vector<std::uint32_t> blocks = {0};
    if (group >= 0) blocks = windows_.needed_blocks(lease, static_cast<std::size_t>(group));
    return begin_group(lease, ticket, group, std::move(blocks), lease.computed_tokens, false);
}

TransferId PeerTransfers::begin_group(Lease& lease, const TicketId& ticket, GroupId group,
                                      std::vector<std::uint32_t> blocks, std::uint32_t num_tokens,
                                      bool receives) {
    PeerTransfer transfer;
    transfer.receives = receives;
    transfer.group = group;
    transfer.ticket = ticket;
    transfer.end_token = num_tokens;
    for (const std::uint32_t block : blocks) {
        const BlockId id = id_of(lease, group, block);
        transfer.ids.push_back(id);
        transfer.after_step =
            std::max(transfer.after_step, groups_.group(group).pool.after_step(id));
    }
    transfer.blocks = std::move(blocks);
    transfer.after_step = after_use(lease, transfer.after_step);
    return begin(lease, std::move(transfer));
}

// Returns true if the window tables are already those of positions that the lease has not computed.
bool PeerTransfers::is_waiting_for_windows(const Lease& lease) const {
    return !lease.windows.empty() && lease.windows.front().received_tokens != 0;
}

void PeerTransfers::check_windows(const Lease& lease, const char* verb,
                                  std::int64_t num_tokens) const {
    if (num_tokens <= static_cast<std::int64_t>(lease.computed_tokens) &&
        !is_waiting_for_windows(lease)) {
        return;
    }
    const auto has_arrived = [num_tokens](const WindowTable& window) {
        return window.has_arrived && window.received_tokens == num_tokens;
    };
    if (std::all_of(lease.windows.begin(), lease.windows.end(), has_arrived)) return;
    throw LeaseError(std::string(verb) + ": the windows behind " + std::to_string(num_tokens) +
                     " positions were not received")
        .of(lease.id())
        .hint("receive all window groups first, or preempt the lease, then resume it");
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

bool PeerTransfers::end_ticket(const Lease& lease, const TicketId& ticket) {
    bool is_receiving = false;  // true while a receive of state or windows is in flight
    for (const TransferId id : lease.peer_transfers) {
        PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.ticket == ticket) give_up(id, transfer);
        is_receiving = is_receiving || (transfer.receives && !transfer.moves_attention());
    }
    return !is_receiving && is_waiting_for_windows(lease) &&
           lease.windows.front().received_ticket == ticket;
}

void PeerTransfers::end_all() {
    std::vector<TransferId> ids;
    for (const auto& [id, transfer] : in_flight_) ids.push_back(id);
    std::sort(ids.begin(), ids.end());
    for (const TransferId id : ids) give_up(id, in_flight_.at(id));
}

PeerRelease PeerTransfers::complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block) {
    const PeerTransfer transfer = std::move(in_flight_.extract(id).mapped());
    transfers_.end_other();
    std::uint32_t good = proven(outcome, first_bad_block, transfer.size());
    counts(transfer).blocks += good;
    counts(transfer).failed += outcome == Outcome::kFailed;
    PeerRelease released;
    for (const LeaseId holder : transfer.holders) {
        Lease& lease = leases_.at(holder);
        std::erase(lease.peer_transfers, id);
        if (lease.is(LeaseState::kReleasing) && !lease.is_in_use()) {
            released.ended.push_back(holder);
        }
    }
    if (transfer.lease == 0) return released;
    Lease& lease = leases_.at(transfer.lease);
    if (transfer.receives && transfer.moves_attention()) {
        good = std::min(good, transfer.kept_blocks);
        note_received(lease, transfer, good);
    } else if (transfer.receives && transfer.group == kRecurrentState) {
        // After a cancellation, the slot still has the old state. But if windows have moved to the
        // received positions, the lease cannot continue with that state.
        if (outcome != Outcome::kCancelled || is_waiting_for_windows(lease)) {
            released.lease = transfer.lease;
            released.state_tokens = good > 0 ? transfer.end_token : 0;
        }
    } else if (transfer.receives) {
        WindowTable& window = lease.windows[static_cast<std::size_t>(transfer.group)];
        window.has_arrived = good == transfer.size() && !transfer.cancelling;
        if (!window.has_arrived) released.lease = transfer.lease;
    }
    ends_.push_back({id, transfer.lease, good, released.state_tokens > 0});
    return released;
}

void PeerTransfers::note_received(Lease& lease, const PeerTransfer& transfer,
                                  std::uint32_t blocks) const {
    if (blocks == 0) return;
    const std::uint32_t first = transfer.first_block() * config_.block_tokens;
    const std::uint32_t end = first + blocks * config_.block_tokens;
    add_range(lease.received, {first, std::min({end, transfer.end_token, lease.num_tokens})});
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
        if (!transfer.receives || transfer.kept_blocks == 0) continue;
        first = std::min(first.value_or(transfer.first_block()), transfer.first_block());
    }
    return first;
}

// Throws if a state or a window is in flight, because it belongs to the computed positions or to
// those that will be committed next.
void PeerTransfers::check_no_side(const Lease& lease, const char* verb) const {
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (!transfer.moves_attention()) throw in_flight(lease, verb, transfer.receives);
    }
}

void PeerTransfers::check_state_copy(const Lease& lease, const char* verb) const {
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.receives && transfer.group == kRecurrentState) check_no_side(lease, verb);
    }
}

void PeerTransfers::check_positions(const Lease& lease, std::int64_t num_tokens) const {
    if (num_tokens <= static_cast<std::int64_t>(lease.computed_tokens)) return;
    check_no_side(lease, "commit");
    const std::optional<std::uint32_t> first = first_receiving(lease);
    if (!first || num_tokens <= static_cast<std::int64_t>(*first) * config_.block_tokens) return;
    throw LeaseError("commit: num_tokens is " + std::to_string(num_tokens) +
                     ", but positions from " + str(std::uint64_t{*first} * config_.block_tokens) +
                     " on are still being received")
        .of(lease.id())
        .hint("wait for the end of the receive first");
}

void PeerTransfers::check_compute(const Lease& lease) const {
    check_no_side(lease, "computing");
    check_windows(lease, "computing", lease.computed_tokens);
    const std::optional<std::uint32_t> first = first_receiving(lease);
    if (!first) return;
    throw LeaseError("computing: positions of a lease from " +
                     str(std::uint64_t{*first} * config_.block_tokens) +
                     " on are still being received")
        .of(lease.id())
        .hint("wait for the end of the receive first");
}

void PeerTransfers::check_swap(const Lease& lease) const {
    check_windows(lease, "preempt", lease.computed_tokens);
    if (lease.peer_transfers.empty()) return;
    throw LeaseError("preempt: transfers between the lease and a peer are in flight")
        .of(lease.id())
        .hint("end the receive or the send first, or preempt without swap");
}

bool PeerTransfers::is_computed(const Lease& lease, const PeerTransfer& transfer) const {
    const std::uint64_t end = std::uint64_t{transfer.end_block()} * config_.block_tokens;
    return lease.computed_tokens >= std::min<std::uint64_t>(end, transfer.end_token);
}

void PeerTransfers::check_truncate(const Lease& lease, std::int64_t num_tokens) const {
    if (num_tokens < 0 || num_tokens >= lease.num_tokens) return;
    check_state_copy(lease, "truncate");
    check_windows(lease, "truncate", lease.computed_tokens);
    const auto length = static_cast<std::uint32_t>(num_tokens);
    if (length % config_.block_tokens == 0) return;
    const std::uint32_t cut = length / config_.block_tokens;
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (cut < transfer.first_block() || cut >= transfer.end_kept()) continue;
        if (!transfer.receives && length >= lease.computed_tokens &&
            (!transfer.is_early || is_computed(lease, transfer))) {
            continue;
        }
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
                           return transfer.end_kept() > blocks;
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
        if (transfer.end_kept() <= blocks) continue;
        transfer.kept_blocks = static_cast<std::uint32_t>(blocks) -
                               std::min(transfer.first_block(), static_cast<std::uint32_t>(blocks));
        transfer.holders.push_back(keeper.id());
        keeper.peer_transfers.push_back(id);
        if (transfer.receives && transfer.kept_blocks == 0) give_up(id, transfer);
    }
}

// -- statistics and checks ---------------------------------------------------------------------

void PeerTransfers::add_to(CoreStatistics& statistics) const {
    for (const Counts& counts : counts_[true]) {
        statistics.receives += counts.begun;
        statistics.failed_receives += counts.failed;
    }
    for (const Counts& counts : counts_[false]) {
        statistics.sends += counts.begun;
        statistics.failed_sends += counts.failed;
    }
    add_to(statistics.attention, kAttention);
}

void PeerTransfers::add_to(GroupStatistics& statistics, GroupId group) const {
    statistics.received_blocks = counts_[true][index_of(group)].blocks;
    statistics.sent_blocks = counts_[false][index_of(group)].blocks;
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
    const auto has_ids = [&](LeaseId holder) {
        if (!is_open(holder)) return false;
        for (std::size_t i = 0; i < transfer.ids.size(); ++i) {
            const Lease& lease = leases_.at(holder);
            if (id_of(lease, transfer.group, transfer.blocks[i]) != transfer.ids[i]) return false;
        }
        return true;
    };
    report.require(transfer.moves_attention() ||
                       std::any_of(transfer.holders.begin(), transfer.holders.end(), has_ids),
                   "I3: no holder of transfer ", id,
                   " of a peer has its state slot or window blocks");
    for (const BlockId window : transfer.ids) {
        report.require(!transfer.receives || transfer.group < 0 ||
                           groups_.group(transfer.group).pool.is_private(window),
                       "I11: window block ", window, " is indexed, and is being received");
    }
    if (transfer.lease == 0) return;
    report.require(transfer.holders.front() == transfer.lease && is_open(transfer.lease) &&
                       (leases_.at(transfer.lease).is(LeaseState::kGranted) ||
                        leases_.at(transfer.lease).is(LeaseState::kFailed)),
                   "I3: the lease of transfer ", id, " of a peer does not have its blocks");
    if (!is_open(transfer.lease)) return;
    const Lease& lease = leases_.at(transfer.lease);
    for (std::uint32_t i = 0; i < transfer.kept_blocks; ++i) {
        report.require(id_of(lease, kAttention, transfer.blocks[i]) == transfer.ids[i],
                       "I3: block ", i, " of transfer ", id, " of a peer changed under way");
    }
    if (!transfer.receives || transfer.kept_blocks == 0) return;
    const std::uint64_t start = std::uint64_t{transfer.first_block()} * config_.block_tokens;
    report.require(lease.computed_tokens <= start, "I11: ", lease.computed_tokens,
                   " positions are computed, but those from ", start, " on are being received");
}

// Checks I11 from scratch. A block that is being received is not free, is in no node of the index,
// and is in the table of one lease only, which is a holder. A block that is being sent is in the
// table of a holder, so it is neither free nor evictable.
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
        if (!transfer.moves_attention()) continue;
        for (const BlockId block : transfer.ids) {
            const std::vector<LeaseId>& having = tables[block];
            const auto is_holder = [&](LeaseId lease) {
                const std::vector<LeaseId>& all = transfer.holders;
                return std::find(all.begin(), all.end(), lease) != all.end();
            };
            report.require(!device_.is_free(block), "I3: block ", block, " of transfer ", id,
                           " of a peer is free");
            report.require(std::any_of(having.begin(), having.end(), is_holder),
                           "I3: no holder of transfer ", id, " of a peer has block ", block);
            if (!transfer.receives) continue;
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
