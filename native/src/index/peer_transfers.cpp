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

void PeerTransfers::check_blocks(const Lease& lease, const char* verb, std::int64_t first_block,
                                 std::int64_t num_blocks) const {
    check_ready(lease, verb);
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
    check_blocks(lease, "receive", first_block, num_blocks);
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
    check_no_side(lease, "receive");
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
        if (!other.moves_blocks() || !other.overlaps(first_block, num_blocks)) continue;
        if (!other.receives() && !other.is_early) continue;
        throw LeaseError("receive: blocks " + str(other.first_block) + " to " +
                         str(other.end_block() - 1) +
                         (other.is_early ? " are being sent" : " are being received already"))
            .of(lease.id());
    }
    remove_range(lease.received,
                 {first * config_.block_tokens, (first + blocks) * config_.block_tokens});
    return begin_blocks(lease, PeerRoute::kReceive, ticket, first, blocks);
}

TransferId PeerTransfers::send(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                               std::int64_t num_blocks, LayerRanges layers) {
    check_blocks(lease, "send", first_block, num_blocks);
    const std::uint32_t computed = config_.blocks_for(lease.computed_tokens);
    if (first_block + num_blocks > static_cast<std::int64_t>(computed)) {
        throw LeaseError("send: " + std::to_string(num_blocks) + " blocks from block " +
                         std::to_string(first_block) + " on: only " + str(computed) +
                         " blocks are computed")
            .of(lease.id())
            .hint("commit the positions first");
    }
    PeerTransfer transfer =
        of_blocks(lease, PeerRoute::kSend, ticket, static_cast<std::uint32_t>(first_block),
                  static_cast<std::uint32_t>(num_blocks));
    transfer.layers = layers;
    return begin(lease, std::move(transfer));
}

TransferId PeerTransfers::send_early(Lease& lease, const TicketId& ticket, std::int64_t first_block,
                                     std::int64_t num_blocks, LayerRanges layers,
                                     std::uint64_t mark, Step step) {
    check_blocks(lease, "send_early", first_block, num_blocks);
    if (layers.first >= layers.end) {
        throw UsageError("send_early: the ranges of layers are " + str(layers.first) + " to " +
                         str(layers.end) + "; at least one must be sent")
            .of(lease.id());
    }
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& other = in_flight_.at(id);
        if (other.route != PeerRoute::kReceive || other.kept_blocks == 0) continue;
        if (!other.overlaps(first_block, num_blocks)) continue;
        throw LeaseError("send_early: blocks " + str(other.first_block) + " to " +
                         str(other.end_block() - 1) + " are being received")
            .of(lease.id());
    }
    PeerTransfer transfer =
        of_blocks(lease, PeerRoute::kSend, ticket, static_cast<std::uint32_t>(first_block),
                  static_cast<std::uint32_t>(num_blocks));
    transfer.layers = layers;
    transfer.is_early = true;
    transfer.mark = mark;
    transfer.after_step = step > device_.finished_step() ? step : 0;
    return begin(lease, std::move(transfer));
}

TransferId PeerTransfers::begin_blocks(Lease& lease, PeerRoute route, const TicketId& ticket,
                                       std::uint32_t first_block, std::uint32_t num_blocks) {
    return begin(lease, of_blocks(lease, route, ticket, first_block, num_blocks));
}

PeerTransfer PeerTransfers::of_blocks(const Lease& lease, PeerRoute route, const TicketId& ticket,
                                      std::uint32_t first_block, std::uint32_t num_blocks) const {
    const auto from = lease.table.begin() + static_cast<std::ptrdiff_t>(first_block);
    PeerTransfer transfer;
    transfer.route = route;
    transfer.ticket = ticket;
    transfer.first_block = first_block;
    transfer.kept_blocks = num_blocks;
    transfer.end_token = static_cast<std::uint32_t>(lease.tokens.size());
    transfer.blocks.assign(from, from + static_cast<std::ptrdiff_t>(num_blocks));
    for (const BlockId block : transfer.blocks) {
        transfer.after_step = std::max(transfer.after_step, device_.after_step(block));
    }
    if (transfer.receives()) transfer.after_step = after_use(lease, transfer.after_step);
    return transfer;
}

// `step`, or the newest step that computed with the lease.
Step PeerTransfers::after_use(const Lease& lease, Step step) const {
    return lease.last_step > device_.finished_step() ? std::max(step, lease.last_step) : step;
}

TransferId PeerTransfers::begin(Lease& lease, PeerTransfer transfer) {
    transfer.lease = lease.id();
    transfer.holders.push_back(lease.id());
    ++counts(transfer.route).begun;
    const TransferId id = transfers_.begin_peer_transfer();
    in_flight_.emplace(id, std::move(transfer));
    lease.peer_transfers.push_back(id);
    return id;
}

// -- recurrent state -------------------------------------------------------------------------

// State and windows are those of one position: they are moved while it does not change.
void PeerTransfers::check_side_ready(const Lease& lease, const char* verb) const {
    check_ready(lease, verb);
    if (lease.batches == 0) return;
    throw LeaseError(std::string(verb) + ": a batch computes with the lease")
        .of(lease.id())
        .hint("let the batch end first");
}

void PeerTransfers::check_received(const Lease& lease, const char* verb,
                                   std::int64_t num_tokens) const {
    const std::uint32_t end = lease.end_of_received();
    if (num_tokens > static_cast<std::int64_t>(lease.computed_tokens) &&
        num_tokens <= static_cast<std::int64_t>(end)) {
        return;
    }
    throw LeaseError(std::string(verb) + ": num_tokens is " + std::to_string(num_tokens) +
                     ", but the lease has computed " + str(lease.computed_tokens) +
                     " positions, and received those before " + str(end))
        .of(lease.id())
        .hint("receive the blocks first");
}

void PeerTransfers::check_computed_side(const Lease& lease, const char* verb,
                                        std::int64_t num_tokens) const {
    if (num_tokens == static_cast<std::int64_t>(lease.computed_tokens) && num_tokens > 0) return;
    throw LeaseError(std::string(verb) + ": num_tokens is " + std::to_string(num_tokens) +
                     "; the lease has computed " + str(lease.computed_tokens) + " positions")
        .of(lease.id())
        .hint("commit exactly these positions first");
}

void PeerTransfers::check_state_ready(const Lease& lease, const char* verb) const {
    if (!state_.exists()) {
        throw UsageError(std::string(verb) + ": the model has no recurrent state; state_slots is 0")
            .of(lease.id())
            .field("state_slots");
    }
    check_side_ready(lease, verb);
    if (lease.recurrent.slot == kNoBlock) {
        throw LeaseError(std::string(verb) + ": the lease computes nothing, and has no state slot")
            .of(lease.id());
    }
}

TransferId PeerTransfers::receive_state(Lease& lease, const TicketId& ticket,
                                        std::int64_t num_tokens) {
    check_state_ready(lease, "receive_state");
    check_no_side(lease, "receive_state");
    check_received(lease, "receive_state", num_tokens);
    check_windows(lease, "receive_state", num_tokens);
    return begin_state(lease, PeerRoute::kReceiveState, ticket,
                       static_cast<std::uint32_t>(num_tokens));
}

TransferId PeerTransfers::send_state(Lease& lease, const TicketId& ticket,
                                     std::int64_t num_tokens) {
    check_state_ready(lease, "send_state");
    check_state_copy(lease, "send_state");
    check_computed_side(lease, "send_state", num_tokens);
    return begin_state(lease, PeerRoute::kSendState, ticket, lease.computed_tokens);
}

TransferId PeerTransfers::begin_state(Lease& lease, PeerRoute route, const TicketId& ticket,
                                      std::uint32_t num_tokens) {
    PeerTransfer transfer;
    transfer.route = route;
    transfer.ticket = ticket;
    transfer.end_token = num_tokens;
    transfer.side_ids = {lease.recurrent.slot};
    transfer.side_blocks = {0};
    transfer.after_step = after_use(lease, state_.after_step(lease));
    return begin(lease, std::move(transfer));
}

// -- sliding windows -------------------------------------------------------------------------

void PeerTransfers::check_group(const Lease& lease, const char* verb, std::size_t group) const {
    if (group < lease.windows.size()) return;
    throw UsageError(std::string(verb) + ": there is no window group " + str(group) +
                     "; the lease has " + str(lease.windows.size()))
        .of(lease.id())
        .field("windows");
}

TransferId PeerTransfers::receive_window(Lease& lease, const TicketId& ticket, std::size_t group,
                                         std::int64_t num_tokens, Step step) {
    check_side_ready(lease, "receive_window");
    check_group(lease, "receive_window", group);
    check_received(lease, "receive_window", num_tokens);
    const WindowTable& window = lease.windows[group];
    const auto tokens = static_cast<std::uint32_t>(num_tokens);
    if (window.received_tokens != 0 && window.received_tokens != tokens) {
        throw LeaseError("receive_window: num_tokens is " + str(tokens) +
                         ", but windows behind position " + str(window.received_tokens) +
                         " are being received already")
            .of(lease.id());
    }
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& other = in_flight_.at(id);
        if (other.moves_blocks()) continue;
        if (other.route == PeerRoute::kReceiveWindow && other.group != group) continue;
        throw LeaseError(
            "receive_window: another transfer of the window, or of the state, is in "
            "flight")
            .of(lease.id());
    }
    if (window.received_tokens == 0) windows_.move_to(lease, tokens, lease.last_use(step));
    for (WindowTable& table : lease.windows) table.received_ticket = ticket;
    return begin_window(lease, PeerRoute::kReceiveWindow, ticket, group,
                        windows_.missing_blocks(lease, group, tokens));
}

TransferId PeerTransfers::send_window(Lease& lease, const TicketId& ticket, std::size_t group,
                                      std::int64_t num_tokens) {
    check_side_ready(lease, "send_window");
    check_group(lease, "send_window", group);
    check_windows(lease, "send_window", lease.computed_tokens);
    check_computed_side(lease, "send_window", num_tokens);
    return begin_window(lease, PeerRoute::kSendWindow, ticket, group,
                        windows_.needed_blocks(lease, group));
}

TransferId PeerTransfers::begin_window(Lease& lease, PeerRoute route, const TicketId& ticket,
                                       std::size_t group, std::vector<std::uint32_t> blocks) {
    PeerTransfer transfer;
    transfer.route = route;
    transfer.ticket = ticket;
    transfer.group = group;
    for (const std::uint32_t block : blocks) {
        const BlockId id = lease.windows[group].table[block];
        transfer.side_ids.push_back(id);
        transfer.after_step = std::max(transfer.after_step, windows_.after_step(group, id));
    }
    transfer.side_blocks = std::move(blocks);
    transfer.after_step = after_use(lease, transfer.after_step);
    return begin(lease, std::move(transfer));
}

// The tables of the lease are those of positions that it has not computed.
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
    bool is_receiving = false;  // state or windows, whose ends will tell
    for (const TransferId id : lease.peer_transfers) {
        PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.ticket == ticket) give_up(id, transfer);
        is_receiving = is_receiving || (transfer.receives() && !transfer.moves_blocks());
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
    transfers_.end_peer_transfer();
    std::uint32_t good = outcome == Outcome::kDone     ? transfer.size()
                         : outcome == Outcome::kFailed ? std::min(first_bad_block, transfer.size())
                                                       : 0;
    counts(transfer.route).blocks += good;
    counts(transfer.route).failed += outcome == Outcome::kFailed;
    PeerRelease released;
    for (const LeaseId holder : transfer.holders) {
        Lease& lease = leases_.at(holder);
        std::erase(lease.peer_transfers, id);
        if (lease.is(LeaseState::kReleasing) && !lease.is_in_use()) {
            released.ended.push_back(holder);
        }
    }
    if (transfer.lease == 0) return released;
    if (transfer.route == PeerRoute::kReceive) {
        good = std::min(good, transfer.kept_blocks);
        note_received(leases_.at(transfer.lease), transfer, good);
    }
    // A state that was cancelled is still the one before, but windows are those behind it.
    if (transfer.route == PeerRoute::kReceiveState &&
        (outcome != Outcome::kCancelled || is_waiting_for_windows(leases_.at(transfer.lease)))) {
        released.lease = transfer.lease;
        released.state_tokens = good > 0 ? transfer.end_token : 0;
    }
    if (transfer.route == PeerRoute::kReceiveWindow) {
        const bool has_arrived = good == transfer.size() && !transfer.cancelling;
        leases_.at(transfer.lease).windows[transfer.group].has_arrived = has_arrived;
        if (!has_arrived) released.lease = transfer.lease;
    }
    ends_.push_back({id, transfer.lease, good, released.state_tokens > 0});
    return released;
}

void PeerTransfers::note_received(Lease& lease, const PeerTransfer& transfer,
                                  std::uint32_t blocks) const {
    if (blocks == 0) return;
    const std::uint32_t first = transfer.first_block * config_.block_tokens;
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
        if (!transfer.receives() || transfer.kept_blocks == 0) continue;
        first = std::min(first.value_or(transfer.first_block), transfer.first_block);
    }
    return first;
}

// State and windows in flight are those behind the computed positions, or behind those that will
// be.
void PeerTransfers::check_no_side(const Lease& lease, const char* verb) const {
    for (const TransferId id : lease.peer_transfers) {
        const PeerTransfer& transfer = in_flight_.at(id);
        if (transfer.moves_blocks()) continue;
        throw LeaseError(std::string(verb) +
                         ": the recurrent state or a window of a lease is being " +
                         (transfer.receives() ? "received" : "sent"))
            .of(lease.id())
            .hint("wait for the end of the transfer first");
    }
}

void PeerTransfers::check_state_copy(const Lease& lease, const char* verb) const {
    for (const TransferId id : lease.peer_transfers) {
        if (in_flight_.at(id).route == PeerRoute::kReceiveState) check_no_side(lease, verb);
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
        if (cut < transfer.first_block || cut >= transfer.first_block + transfer.kept_blocks) {
            continue;
        }
        if (!transfer.receives() && length >= lease.computed_tokens &&
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
    const auto add = [this](PeerRoute route, std::uint64_t& begun, std::uint64_t& failed) {
        begun += counts(route).begun;
        failed += counts(route).failed;
        return counts(route).blocks;
    };
    std::uint64_t& receives = statistics.receives;
    std::uint64_t& failed_receives = statistics.failed_receives;
    statistics.received_blocks = add(PeerRoute::kReceive, receives, failed_receives);
    statistics.received_states = add(PeerRoute::kReceiveState, receives, failed_receives);
    statistics.received_window_blocks = add(PeerRoute::kReceiveWindow, receives, failed_receives);
    std::uint64_t& sends = statistics.sends;
    std::uint64_t& failed_sends = statistics.failed_sends;
    statistics.sent_blocks = add(PeerRoute::kSend, sends, failed_sends);
    statistics.sent_states = add(PeerRoute::kSendState, sends, failed_sends);
    statistics.sent_window_blocks = add(PeerRoute::kSendWindow, sends, failed_sends);
}

// The state slot, or the window blocks, of the transfer are those of the lease.
bool PeerTransfers::has_sides(const Lease& lease, const PeerTransfer& transfer) const {
    if (transfer.route == PeerRoute::kReceiveState || transfer.route == PeerRoute::kSendState) {
        return lease.recurrent.slot == transfer.side_ids.front();
    }
    if (transfer.group >= lease.windows.size()) return false;
    const std::vector<BlockId>& table = lease.windows[transfer.group].table;
    for (std::size_t i = 0; i < transfer.side_ids.size(); ++i) {
        const std::size_t block = transfer.side_blocks[i];
        if (block >= table.size() || table[block] != transfer.side_ids[i]) return false;
    }
    return true;
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
    if (!transfer.moves_blocks()) {
        const auto has_sides = [&](LeaseId holder) {
            return is_open(holder) && this->has_sides(leases_.at(holder), transfer);
        };
        report.require(std::any_of(transfer.holders.begin(), transfer.holders.end(), has_sides),
                       "I3: no holder of transfer ", id,
                       " of a peer has its state slot or window blocks");
    }
    for (const BlockId side : transfer.side_ids) {
        report.require(transfer.route != PeerRoute::kReceiveWindow ||
                           windows_.is_private(transfer.group, side),
                       "I11: window block ", side, " is indexed, and is being received");
    }
    if (transfer.lease == 0) return;
    report.require(transfer.holders.front() == transfer.lease && is_open(transfer.lease) &&
                       (leases_.at(transfer.lease).is(LeaseState::kGranted) ||
                        leases_.at(transfer.lease).is(LeaseState::kFailed)),
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
