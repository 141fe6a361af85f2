#include "aiokv/releases.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {
namespace {

void require_handle(const Lease& lease, const char* verb) {
    if (!lease.is(LeaseState::kReleasing)) return;
    throw LeaseError(std::string(verb) + ": the lease is released already; batches or " +
                     "transfers in flight keep its blocks")
        .of(lease.id());
}

}  // namespace

// -- giving back -----------------------------------------------------------------------------

bool Releases::release(Lease& lease, Step step, Step used_in, std::string_view label) {
    require_handle(lease, "release");
    if (!label.empty()) residency_.on_label(lease, label);
    lease.last_step = std::max(lease.last_step, used_in);
    peers_.abandon(lease);
    if (!lease.is_in_use()) {
        end(lease, step);
        return true;
    }
    lease.last_step = lease.last_use(step);
    lease.step_is_exact = true;  // no later step uses the blocks of a released lease
    promises_.withdraw(lease);
    if (lease.is(LeaseState::kFailed)) lease.flags.writes = false;  // it publishes nothing more
    leases_.move(lease, LeaseState::kReleasing);
    lease.retires = false;
    if (!lease.saving.empty()) external_.saves().keep_promise(lease);
    return false;
}

void Releases::end(Lease& lease, Step step) {
    give_back(lease, step, LeaseState::kFree);
    index_.forget_items(lease);
    leases_.close(lease);
    index_.leave_context(lease.context);
}

LeaseId Releases::retract(Lease& lease, Step step) {
    require_handle(lease, "retract");
    const LeaseId keeper = lease.is_in_use() ? set_aside(lease, step) : 0;
    give_back(lease, step, LeaseState::kMatched);
    return keeper;
}

void Releases::give_back(Lease& lease, Step step, LeaseState next) {
    step = lease.last_use(step);
    promises_.withdraw(lease);
    uses_.forget(lease);
    if (lease.is(LeaseState::kSwapped)) swaps_.drop(lease);
    if (lease.swap_transfer != 0) swaps_.orphan_tail(lease, lease.swap_transfer, step);
    if (lease.has_blocks()) {
        leave_onloads(lease, step);
        if (external_.exist()) {
            external_.give_up(lease);
        } else {
            residency_.free_table(lease, step);
        }
    }
    auxiliary_.release(lease, step);
    if (!lease.is(next)) leases_.move(lease, next);
    lease.num_tokens = lease.computed_tokens = lease.cached_tokens = 0;
    lease.version = 0;
    lease.last_step = 0;
    lease.step_is_exact = false;
    lease.path.clear();
}

void Releases::leave_onloads(Lease& lease, Step step) {
    for (const TransferId id : lease.onloads) {
        if (transfers_.is_move(id)) {
            auxiliary_.orphan_move(lease, id, transfers_.move(id).group, step);
            continue;
        }
        if (external_.exist()) {
            external_.leave_onload(id, lease.id());
            continue;
        }
        if (transfers_.get(id).has_tail_of(lease.id())) swaps_.orphan_tail(lease, id, step);
        transfers_.leave(id, lease.id());
    }
    lease.onloads.clear();
}

// -- truncate --------------------------------------------------------------------------------

void Releases::check_truncate(const Lease& lease, std::int64_t num_tokens) const {
    const std::string to = "truncate to " + std::to_string(num_tokens) + " positions: ";
    const std::size_t shared = lease.retires ? 0 : lease.path.size() + lease.saving.size();
    const auto indexed = static_cast<std::int64_t>(shared * config_.block_tokens);
    if (!lease.has_blocks()) {
        throw LeaseError(to + "the lease is " + name_of(lease.state) + " and has no blocks")
            .of(lease.id())
            .hint("call allocate first");
    }
    if (lease.is(LeaseState::kSwapping)) {
        throw LeaseError(to + "the lease is being swapped to host memory").of(lease.id());
    }
    if (auxiliary_.exist() && num_tokens < lease.computed_tokens) {
        throw LeaseError(to + "the recurrent state, or a window, is already at position " +
                         str(lease.computed_tokens))
            .of(lease.id());
    }
    if (num_tokens < indexed || num_tokens > lease.num_tokens) {
        throw LeaseError(to + "the lease has " + str(lease.num_tokens) + ", of which " +
                         std::to_string(indexed) + " are shared")
            .of(lease.id());
    }
    const auto length = static_cast<std::uint32_t>(num_tokens);
    const std::uint32_t blocks = config_.blocks_for(length);
    if (blocks < lease.table.size() && lease.is_in_use() && !lease.windows.empty()) {
        throw LeaseError(to + "a batch or a transfer uses the lease, which has sliding windows")
            .of(lease.id())
            .hint("let the batch or the transfer end first, or keep at least " +
                  std::to_string((lease.table.size() - 1) * config_.block_tokens + 1) +
                  " positions");
    }
    if (!external_.exist() && blocks < lease.path.size() + swaps_.tail_under_way(lease)) {
        throw LeaseError(to + "a transfer still writes blocks behind them")
            .of(lease.id())
            .hint("await layers.wait_all() first");
    }
    peers_.check_truncate(lease, num_tokens);
    if (lease.tokens.size() <= length) return;
    for (const ItemSpan& item : lease.items) {
        if (item.start >= length || item.stop <= length) continue;
        throw LeaseError(to + "the item at positions " + str(item.start) + " to " + str(item.stop) +
                         " would be cut; truncate to " + str(item.start) + " or less, or to " +
                         str(item.stop) + " or more")
            .of(lease.id());
    }
}

LeaseId Releases::truncate(Lease& lease, std::int64_t num_tokens, Step step) {
    check_truncate(lease, num_tokens);
    const auto length = static_cast<std::uint32_t>(num_tokens);
    const std::uint32_t blocks = config_.blocks_for(length);
    LeaseId keeper = 0;
    if (external_.exist()) {
        // No transfer uses the ids behind those of shared blocks, which a retired lease drops.
        external_.drop_retiring(lease);
    } else if (blocks < lease.table.size() &&
               (lease.batches > 0 || peers_.use_behind(lease, blocks))) {
        keeper = cut_table(lease, blocks, step);
    } else {
        for (std::size_t i = blocks; i < lease.table.size(); ++i) {
            device_.use_in(lease.table[i], lease.last_use(step));
            device_.give_back(lease.table[i]);
        }
    }
    promises_.remove(lease);  // it reads fields of the lease that change below
    lease.table.resize(blocks);
    lease.keep_received(0, length);
    // With external blocks, a lease has all positions of the blocks that the server has named.
    lease.num_tokens = external_.exist() ? blocks * config_.block_tokens : length;
    lease.computed_tokens = std::min(lease.computed_tokens, length);
    lease.covered_tokens = std::min(lease.covered_tokens, length);
    if (lease.tokens.size() > length) {
        lease.tokens.resize(length);
        index_.cut_items(lease, length);
    }
    if (lease.frontier != kNone) promises_.add(lease);
    windows_.fit(lease, step);
    external_.groups().truncate(lease, blocks);
    return keeper;
}

// -- keepers ---------------------------------------------------------------------------------

// Opens a lease without a handle, which counts as a lease of the same context.
Lease& Releases::open_keeper(const Lease& lease, Step step) {
    LeaseFlags flags = lease.flags;
    flags.reads = flags.writes = flags.whole = false;
    index_.enter_context(lease.context);
    Lease& keeper = leases_.open({}, lease.context, flags);
    keeper.epoch = lease.epoch;
    keeper.last_step = lease.last_use(step);
    return keeper;
}

// Lets the keeper end with its last batch or transfer.
void Releases::await_end_of_use(Lease& keeper) {
    leases_.move(keeper, LeaseState::kReleasing);
    keeper.step_is_exact = true;
}

// Moves all blocks of a lease to a keeper, which ends with the batches and transfers in flight.
LeaseId Releases::set_aside(Lease& lease, Step step) {
    Lease& keeper = open_keeper(lease, step);
    promises_.withdraw(lease);
    keeper.path = std::exchange(lease.path, {});
    keeper.table = std::exchange(lease.table, {});
    keeper.onloads = std::exchange(lease.onloads, {});
    keeper.recurrent = std::exchange(lease.recurrent, {});
    keeper.windows = std::exchange(lease.windows, {});
    keeper.num_tokens = lease.num_tokens;
    keeper.computed_tokens = lease.computed_tokens;
    keeper.cached_tokens = lease.cached_tokens;
    for (const TransferId id : keeper.onloads) {
        if (external_.exist() && !transfers_.is_move(id)) {
            external_.replace_lease(id, lease.id(), keeper.id());
        } else {
            transfers_.replace_lease(id, lease.id(), keeper.id());
        }
    }
    external_.saves().hand_over(lease, keeper);
    batches_.hand_over(lease, keeper);
    peers_.hand_over(lease, keeper);
    await_end_of_use(keeper);
    return keeper.id();
}

// Moves the blocks of the table from `blocks` on to a keeper. The caller then shortens the table.
LeaseId Releases::cut_table(Lease& lease, std::size_t blocks, Step step) {
    Lease& keeper = open_keeper(lease, step);
    keeper.flags.computes = false;
    keeper.table.assign(lease.table.begin() + static_cast<std::ptrdiff_t>(blocks),
                        lease.table.end());
    keeper.num_tokens = static_cast<std::uint32_t>(keeper.table.size()) * config_.block_tokens;
    batches_.share(lease, keeper);
    peers_.cut(lease, blocks, keeper);
    await_end_of_use(keeper);
    return keeper.id();
}

}  // namespace aiokv
