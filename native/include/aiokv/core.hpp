// The scheduler's core: prefix index, block pools, leases, transfers and eviction.
//
// One call is one state transition, on one thread, without I/O: so there are no locks. Core owns
// the components, hands a lease to those that a transition concerns, and has no state of its own.
// Each component knows only those above it:
//
//   leases_       the records of leases, and the transitions of their states
//   device_ host_ ids of the two tiers
//   index_        the tree, its contexts and items
//   transfers_    the ledger of what is in flight
//   stored_       digests of blocks, and which of them the stores have
//   events_       changes of the two tiers, for subscribers
//   state_ windows_ auxiliary_   ids beside full attention: recurrent state, sliding windows
//   residency_    copies of indexed blocks, refs and holds, eviction
//   saver_        when blocks get their host copy
//   store_saver_ fetches_   the ways from the host tier to the stores, and back
//   promises_ uses_ batches_     what leases will compute, wait for, and compute now
//   peers_        the ways between leases and other engines
//   device_uses_ external_groups_ external_   leases on device blocks that a server owns
//   matching_ misses_ publication_ swaps_ grants_ releases_ completions_ tiers_ decoding_   the
//   transitions
//
// violations() checks the invariants I1-I6 of the design from scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/auxiliary_stores.hpp"
#include "aiokv/batches.hpp"
#include "aiokv/block_events.hpp"
#include "aiokv/completions.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/decoding.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/external_blocks.hpp"
#include "aiokv/external_groups.hpp"
#include "aiokv/fetches.hpp"
#include "aiokv/grants.hpp"
#include "aiokv/hot_prefixes.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/matching.hpp"
#include "aiokv/misses.hpp"
#include "aiokv/peer_transfers.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/publication.hpp"
#include "aiokv/releases.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/saver.hpp"
#include "aiokv/store_saver.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/swaps.hpp"
#include "aiokv/tiers.hpp"
#include "aiokv/transfer_ledger.hpp"
#include "aiokv/uses.hpp"

namespace aiokv {

class Core {
  public:
    explicit Core(const CoreConfig& config);

    // -- leases. The id of a closed lease, or one that was never given out, throws LeaseError.
    Hit match(Tokens tokens, std::string_view context, bool reads = true, bool writes = true,
              std::span<const Item> items = {});
    // Returns the hit that match() would find. Changes nothing, not even recency.
    Hit would_hit(Tokens tokens, std::string_view context, std::span<const Item> items = {}) const;
    // Matches the prompt of a waiting lease again, and marks the hit as used now. All computed
    // tokens of a swapped lease count as its prompt, and as cached.
    struct CachedPart {
        std::uint32_t cached_tokens;
        std::uint32_t prompt_tokens;
    };
    CachedPart rematch(LeaseId id);
    Pending pending(LeaseId id) { return matching_.pending(leases_.at(id), promises_); }
    void check_request(LeaseId id, std::int64_t num_tokens, Reserve reserve = {}) const {
        grants_.check_request(leases_.at(id), num_tokens, reserve);
    }
    Grant allocate(LeaseId id, std::int64_t num_tokens, Reserve reserve = {}) {
        return grants_.allocate(leases_.at(id), num_tokens, reserve);
    }
    Grant prolong(LeaseId id, Tokens more) { return grants_.prolong(leases_.at(id), more); }
    bool can_allocate(LeaseId id, std::int64_t num_tokens, bool saves, Reserve reserve = {}) {
        return grants_.can_allocate(leases_.at(id), num_tokens, saves, reserve);
    }
    std::uint32_t allocatable_blocks(std::uint32_t limit, bool saves, std::string_view salt) {
        external_.refuse("allocatable_blocks", "ask the server, which has the device blocks");
        return grants_.allocatable_blocks(limit, saves, salt);
    }
    std::uint32_t extendable_blocks(std::uint32_t limit, bool saves, std::string_view salt) {
        external_.refuse("extendable_blocks", "ask the server, which has the device blocks");
        return grants_.extendable_blocks(limit, saves, salt);
    }
    bool extend(std::span<const LeaseId> ids, std::int64_t num_tokens) {
        external_.refuse("extend", "name the blocks of new positions with assign");
        return grants_.extend(ids, num_tokens);
    }
    // Names the external device blocks of the next positions.
    void assign(LeaseId id, std::span<const BlockId> ids, std::int64_t computed_tokens,
                std::span<const BlockId> group_ids) {
        external_.assign(leases_.at(id), ids, computed_tokens, group_ids);
    }
    // `id`: any lease that match() has returned, even a released one.
    bool is_idle(LeaseId id) const { return external_.uses().is_idle(id); }
    // Returns the newest unfinished step that is_idle() waits for, or 0.
    Step idle_after_step(LeaseId id) const { return external_.after_step(id); }
    // Assigns blocks whose positions are computed, appends tokens, and commits all positions of the
    // table, of which the server keeps the first blocks on the device; see Lease::kept_blocks.
    // Returns what commit() returns.
    std::uint32_t commit_blocks(LeaseId id, std::span<const BlockId> ids, Tokens tokens,
                                std::span<const BlockId> group_ids, Step step,
                                std::uint32_t kept_blocks = 0);
    // See ExternalBlocks::retire(). Returns false, changing nothing, if can_retire() does. `label`:
    // as for release().
    bool retire(LeaseId id, std::string_view label = {});
    // What has followed from calls with external blocks.
    struct Settled {
        std::vector<LeaseId> ended;     // released leases that waited for external saves only
        std::vector<LeaseId> advanced;  // leases of which saves have made blocks matchable
        std::vector<LeaseId> idle;      // leases that have become idle
        bool empty() const { return ended.empty() && advanced.empty() && idle.empty(); }
    };
    // Ends the released leases that waited for external saves only.
    Settled settle();
    std::vector<BlockId> take_queued_ids() { return external_.saves().take_queued_ids(); }
    void give_up_saves() { external_.saves().give_up_queue(); }
    Fork fork(LeaseId id, Step step) {
        external_.refuse("fork", "match the prompt again, and assign the blocks that it shares");
        peers_.check_state_copy(leases_.at(id), "fork");
        return grants_.fork(leases_.at(id), step);
    }
    void append(LeaseId id, Tokens tokens, std::span<const Item> items = {}) {
        publication_.append(leases_.at(id), tokens, items);
    }
    std::uint32_t commit(LeaseId id, std::int64_t num_tokens, Step step) {
        peers_.check_commit(leases_.at(id), num_tokens);
        return publication_.commit(leases_.at(id), num_tokens, step);
    }
    // See Decoding::advance().
    Advanced advance(std::span<const LeaseId> ids, const StepTokens& tokens,
                     std::int64_t draft_tokens, Step step) {
        return decoding_.advance(ids, tokens, draft_tokens, step);
    }
    // retract() and truncate() return the lease that keeps the blocks for the batches and transfers
    // of peers in flight, or 0.
    LeaseId retract(LeaseId id, Step step) { return releases_.retract(leases_.at(id), step); }
    LeaseId truncate(LeaseId id, std::int64_t num_tokens, Step step) {
        return releases_.truncate(leases_.at(id), num_tokens, step);
    }
    // Returns false if batches or transfers of peers in flight still use the blocks: end_batch() or
    // complete() then releases the lease.
    bool release(LeaseId id, Step step, Step used_in = 0, std::string_view label = {}) {
        return releases_.release(leases_.at(id), step, used_in, label);
    }
    std::int64_t recompute_from(LeaseId id) { return completions_.recompute_from(leases_.at(id)); }
    // The lease will compute nothing, so a grant gives it no state slot. With `whole`, it may hit
    // all full blocks of its prompt.
    void compute_nothing(LeaseId id, bool whole = false);

    const Lease& lease(LeaseId id) const { return leases_.at(id); }
    // Returns the device blocks of the hit: of a new match while the lease is matched, of the grant
    // afterwards, and none while the lease is swapped.
    std::vector<BlockId> hit_blocks(LeaseId id);
    Usage usage(LeaseId id) const;
    // Notes that stores have the first `blocks` blocks of a prompt, and why not all were fetched.
    void note_left_in_store(LeaseId id, std::uint32_t blocks, StoreMiss why) {
        leases_.at(id).stored_blocks = blocks;
        leases_.at(id).left_in_store = why;
    }
    // Of the last grant; see Misses::explain().
    const std::vector<MissedRun>& missed(LeaseId id) const { return leases_.at(id).missed; }
    // Returns the context of a run with kOtherContext; empty if it was closed.
    std::string context_of(const MissedRun& run) const {
        const PrefixTree& tree = index_.tree();
        const bool is_open = tree.is_live(run.other_root) && tree[run.other_root].has(kRoot);
        return is_open ? std::string(index_.context_of_root(run.other_root)) : std::string();
    }
    std::optional<Misses::Divergence> divergence(LeaseId id, const MissedRun& run) const {
        return misses_.divergence(leases_.at(id), run);
    }
    // Returns the hit of the last grant in a group besides attention; empty after a failed onload.
    GroupHit group_hit(LeaseId id, GroupId group) const;
    // Returns true if the lease has blocks and its hit can still be matched, because there was no
    // reset and no failed copy since then.
    bool is_current(LeaseId id) const;
    // Returns the table of a window group, or, for group -1, the table of all other layers.
    const std::vector<BlockId>& table_of(LeaseId id, std::int32_t group) const;
    // Returns the number of blocks of the longest table. Released leases count as 0.
    std::size_t longest_table(std::span<const LeaseId> ids) const;
    std::vector<std::int32_t> lengths(std::span<const LeaseId> ids) const;
    void block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                      BlockId fill, std::int32_t group = -1) const;

    // -- compute in flight
    BatchId begin_batch(std::span<const LeaseId> ids);
    // Returns true while an onload is in flight for one of the leases: computing must wait for it.
    bool has_onloads(std::span<const LeaseId> ids) const {
        return std::any_of(ids.begin(), ids.end(),
                           [&](LeaseId id) { return !leases_.at(id).onloads.empty(); });
    }
    // `step`: step that includes the batch's work, or 0. Returns the leases that waited for this
    // batch and are released now.
    std::vector<LeaseId> end_batch(BatchId id, Step step);
    std::vector<BatchId> batches(LeaseId id) const { return batches_.of(id); }

    // -- backups; 0 when there is nothing to copy
    TransferId take_backups() {
        return external_.exist() ? external_.saves().take() : saver_.take_backups();
    }
    // take_backups() has left blocks to its next call.
    bool has_queued_backups() const { return !external_.exist() && saver_.has_queued(); }
    TransferId take_write_backs(std::uint32_t wanted) { return saver_.take_write_backs(wanted); }
    bool wants_write_backs() const { return !external_.exist() && saver_.wants_write_backs(); }
    bool must_look_further() const { return saver_.must_look_further(); }
    bool wants_backups() const {
        if (external_.exist()) return external_.saves().wants() || auxiliary_.want_saves();
        return saver_.wants_backups() || auxiliary_.want_saves();
    }

    // -- swap
    TransferId saving(LeaseId id) const { return swaps_.saving(leases_.at(id)); }
    bool swap_out(LeaseId id, Step step) {
        external_.refuse("swap", "preempt without a swap: committed blocks are in host memory");
        peers_.check_swap(leases_.at(id));
        return swaps_.begin(leases_.at(id), step);
    }

    // -- recurrent state and sliding windows
    StateCopy snapshot(LeaseId id, std::int64_t num_tokens, Step step) {
        peers_.check_state_copy(leases_.at(id), "snapshot");
        return state_.snapshot(leases_.at(id), num_tokens, step);
    }
    void discard_snapshot(LeaseId id, BlockId slot) {
        state_.discard_snapshot(leases_.at(id), slot);
    }
    std::vector<std::uint32_t> snapshot_points(LeaseId id) const;
    // Begins a save of ids of one group to host memory. Returns 0 if there is nothing to save.
    TransferId take_group_save() { return auxiliary_.take_save(); }
    bool is_move(TransferId id) const { return transfers_.is_move(id); }
    const Move& move(TransferId id) const { return transfers_.move(id); }
    std::uint32_t max_extend_tokens(LeaseId id) const {
        return windows_.max_extend_tokens(leases_.at(id));
    }
    const WindowGroup& window_group(std::size_t group) const { return windows_.group(group); }

    // -- stores: nothing without CoreConfig::stores
    Missing missing(LeaseId id, std::size_t blocks = Fetches::kMostMissing) {
        return fetches_.missing(leases_.at(id), blocks);
    }
    TransferId begin_fetch(LeaseId id, std::size_t blocks, TransferId replaced = 0) {
        return fetches_.begin(leases_.at(id), blocks, replaced);
    }
    Boundaries boundaries(LeaseId id, std::size_t skip) {
        return fetches_.boundaries(leases_.at(id), skip);
    }
    // These calls are for groups besides attention. See AuxiliaryStores.
    std::vector<std::uint8_t> has_copies(LeaseId id, GroupId group, std::size_t first,
                                         std::size_t end) {
        return auxiliary_stores_.has_copies(leases_.at(id), group, first, end);
    }
    TransferId begin_auxiliary_fetch(LeaseId id, GroupId group, std::size_t blocks) {
        return auxiliary_stores_.begin_fetch(leases_.at(id), group, blocks);
    }
    bool wants_saves() const {
        return store_saver_.wants_saves() || auxiliary_stores_.wants_saves();
    }
    TransferId take_saves() {
        const TransferId id = store_saver_.take();
        return id != 0 ? id : auxiliary_stores_.take();
    }
    // Returns a fetch or a save in flight. Throws UsageError for any other id.
    const StoreTransfer& store_transfer(TransferId id) const;
    // Returns the group of a fetch or a save in flight.
    GroupId group_of(TransferId id) const {
        return auxiliary_stores_.has(id) ? auxiliary_stores_.group_of(id) : kAttention;
    }

    // -- peers
    // `step`: the open step, which may still use the window blocks that the lease gives back.
    TransferId receive(LeaseId id, const TicketId& ticket, std::int64_t num_tokens, GroupId group,
                       std::int64_t first_block, Step step) {
        return peers_.receive(leases_.at(id), ticket, num_tokens, group, first_block, step);
    }
    // `step`: the open step. It computes the layers of a mark, at the latest.
    TransferId send(LeaseId id, const TicketId& ticket, std::int64_t num_tokens, GroupId group,
                    std::int64_t first_block, LayerRanges layers, std::uint64_t mark, Step step) {
        return peers_.send(leases_.at(id), ticket, num_tokens, group, first_block, layers, mark,
                           step);
    }
    // Fails the lease if it has windows of the ticket behind positions that are not committed.
    void end_ticket(LeaseId id, const TicketId& ticket) {
        Lease& lease = leases_.at(id);
        if (peers_.end_ticket(lease, ticket)) completions_.lose_sides(lease);
    }
    // Requires that all windows have arrived. With recurrent state, the end of its receive commits,
    // not this call.
    std::uint32_t commit_received(LeaseId id, std::int64_t num_tokens);
    // Throws LeaseError if these positions have no tokens.
    Digest prompt_digest(LeaseId id, std::int64_t num_tokens) const;
    const PeerTransfer& peer_transfer(TransferId id) const { return peers_.get(id); }
    std::vector<PeerEnd> take_peer_ends() { return peers_.take_ends(); }
    std::vector<TransferId> take_abandoned_peer_transfers() { return peers_.take_abandoned(); }

    // -- transfers
    const Transfer& transfer(TransferId id) const {
        return external_.has(id) ? external_.get(id) : transfers_.get(id);
    }
    bool is_in_flight(TransferId id) const {
        return transfers_.has(id) || fetches_.has(id) || store_saver_.has(id) ||
               auxiliary_stores_.has(id) || peers_.has(id) || external_.has(id);
    }
    // `results`: a SaveResult per block of a save; else empty. Returns the leases that waited for a
    // transfer of a peer and are released now.
    std::vector<LeaseId> complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block,
                                  std::span<const std::uint8_t> results = {});
    std::vector<TransferId> take_abandoned() {
        return external_.exist() ? external_.take_abandoned() : transfers_.take_abandoned();
    }
    void mark_cancelling(TransferId id) { transfers_.mark_cancelling(id); }
    // Steps finish in the order of their numbers.
    void close_step(Step step) {
        device_.close_step(step);
        auxiliary_.close_step(step);
        saver_.close_step();
    }
    void finish_step(Step step) {
        device_.finish_step(step);
        auxiliary_.finish_step(step);
    }
    // Returns the newest step that may still read or write blocks, state slots or windows; 0 if
    // there is none.
    Step unfinished_step() const {
        return std::max(device_.unfinished_step(), auxiliary_.unfinished_step());
    }

    // -- capacity
    std::uint32_t evict_device(std::uint32_t blocks) { return residency_.evict_device(blocks); }
    std::uint32_t evict_host(std::uint32_t blocks) { return residency_.evict_host(blocks); }
    void resize_device(std::int64_t blocks) {
        external_.refuse("resize", "the server sizes its tensors before it makes the engine");
        tiers_.resize_device(blocks);
    }
    void forget_device() { tiers_.forget_device(); }
    void forget_host() { tiers_.forget_host(); }
    // `new_weights`: the history keeps what was cached, as blocks of other weights.
    void reset(bool new_weights = false);
    // Makes all blocks of a salt unmatchable: see Tiers::purge().
    void purge(std::string_view salt);
    // No store has the first block of missing().
    void note_lacking(LeaseId id);
    std::uint32_t device_blocks() const { return device_.capacity(); }
    std::uint32_t block_tokens() const { return config_.block_tokens; }

    // -- preferences of eviction. Each call returns the number of blocks that it concerns.
    std::size_t retain(Tokens tokens, std::string_view context, std::span<const Item> items,
                       std::uint32_t priority, std::uint64_t end) {
        const std::vector<NodeId> path = find_path("retain", tokens, context, items);
        residency_.retain(path, priority, end);
        return path.size();
    }
    std::uint32_t demote(Tokens tokens, std::string_view context, std::span<const Item> items) {
        return residency_.demote(find_path("demote", tokens, context, items));
    }
    std::uint32_t forget(Tokens tokens, std::string_view context, std::span<const Item> items) {
        return residency_.forget(find_path("forget", tokens, context, items));
    }
    void end_retentions(std::uint64_t now) { residency_.end_retentions(now); }
    std::map<std::string, std::uint32_t> retained_blocks() { return residency_.retained_blocks(); }

    // -- uses of prefixes that a lease keeps
    void await_use(LeaseId id) { uses_.await(leases_.at(id)); }
    bool awaits_use(LeaseId id) const { return leases_.at(id).awaited != kNone; }
    std::vector<LeaseId> take_used() { return uses_.take(); }

    // -- counts in O(1)
    std::uint32_t granted_leases() const { return leases_.with_blocks(); }
    // Returns the number of leases that have blocks and compute, which those of pins do not.
    std::uint32_t computing_leases() const { return leases_.computing(); }
    std::uint32_t swapped_leases() const { return leases_.count(LeaseState::kSwapped); }
    std::uint64_t computed_prompt_tokens() const { return publication_.computed_prompt_tokens(); }
    Room room() const {
        return {device_.free_blocks(), residency_.evictable(), state_.usable_slots()};
    }

    // The changes of the two tiers, for subscribers.
    BlockEvents& events() { return events_; }

    const Histogram& hold_times() const { return leases_.hold_times(); }
    CoreStatistics statistics() const;
    // Returns the counts of a group besides attention; zeros for recurrent state that the model
    // does not have. Throws UsageError if the cache has no such group.
    GroupStatistics group_statistics(GroupId group) const;
    std::vector<std::string> violations() const;
    std::vector<BlockView> blocks() const { return index_.blocks(); }
    HotPrefixes hottest_prefixes(std::size_t limit) const {
        return aiokv::hottest_prefixes(index_, limit);
    }
    std::vector<const Lease*> oldest_leases(std::size_t limit) const {
        return leases_.oldest(limit, kMaxListed);
    }

  private:
    std::vector<LeaseId> end_saved();                // see settle()
    static constexpr std::size_t kMaxListed = 4096;  // most leases to look at: < 1 ms

    // Returns the cached full blocks of a prompt, in all tiers.
    std::vector<NodeId> find_path(const char* call, Tokens tokens, std::string_view context,
                                  std::span<const Item> items) const;
    // Returns the table of a lease; empty if the lease was released.
    const std::vector<BlockId>& table_if_held(LeaseId id, std::int32_t group) const;
    void finish_state(Lease& lease, std::uint32_t num_tokens);

    CoreConfig config_;
    LeaseTable leases_;
    DevicePool device_;
    RunPool host_;
    Index index_;
    TransferLedger transfers_;
    StoredBlocks stored_;
    BlockEvents events_;
    RecurrentState state_;
    SlidingWindows windows_;
    DeviceUses device_uses_;
    ExternalGroups external_groups_;
    AuxiliaryGroups auxiliary_;
    Residency residency_;
    Saver saver_;
    StoreSaver store_saver_;
    Promises promises_;
    Uses uses_;
    Batches batches_;
    PeerTransfers peers_;
    ExternalBlocks external_;
    Matching matching_;
    Misses misses_;
    Fetches fetches_;
    Publication publication_;
    Swaps swaps_;
    Grants grants_;
    Releases releases_;
    Completions completions_;
    Tiers tiers_;
    AuxiliaryStores auxiliary_stores_;
    Decoding decoding_;
};

}  // namespace aiokv
