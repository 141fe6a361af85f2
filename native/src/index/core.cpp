#include "aiokv/core.hpp"

#include <algorithm>
#include <iterator>
#include <string>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

void check_prompt(const std::string& call, Tokens tokens, std::span<const Item> items) {
    if (tokens.empty()) throw UsageError(call + ": the prompt has no tokens");
    if (tokens.size() > static_cast<std::size_t>(kMaxTokens)) {
        throw UsageError(call + ": the prompt has " + str(tokens.size()) +
                         " tokens; it must have at most " + std::to_string(kMaxTokens));
    }
    check_items(items, 0, tokens.size());
}

CoreConfig checked(const CoreConfig& config) {
    if (config.block_tokens == 0) {
        throw ConfigError("block_tokens is 0; it must be at least 1").field("block_tokens");
    }
    if (config.device_blocks == 0) {
        throw ConfigError("device_blocks is 0; it must be at least 1").field("device_blocks");
    }
    if (config.leave_tokens == 0) {
        throw ConfigError("leave_tokens is 0; it must be at least 1").field("leave_tokens");
    }
    const auto require_at_most = [](const char* field, std::uint32_t value) {
        if (value <= kMaxBlocks) return;
        throw ConfigError(std::string(field) + " is " + str(value) + "; it must be at most " +
                          str(kMaxBlocks))
            .field(field);
    };
    require_at_most("device_blocks", config.device_blocks);
    require_at_most("host_blocks", config.host_blocks);
    require_at_most("miss_history_blocks", config.history_blocks);
    require_at_most("state_slots", config.state_slots);
    require_at_most("host_state_slots", config.host_state_slots);
    for (const WindowConfig& window : config.windows) {
        require_at_most("windows", window.device_blocks);
        require_at_most("windows", window.host_blocks);
    }
    if (config.max_leases == 0 || config.max_leases > kMaxLeases) {
        throw ConfigError("max_leases is " + str(config.max_leases) +
                          "; it must be between 1 and " + str(kMaxLeases))
            .field("max_leases");
    }
    if (config.reserve_blocks >= config.device_blocks) {
        throw ConfigError("reserve_blocks (" + str(config.reserve_blocks) +
                          ") must be below device_blocks (" + str(config.device_blocks) + ")")
            .field("reserve_blocks");
    }
    CoreConfig valid = config;
    if (config.host_blocks == 0) valid.write_policy = SavePolicy::kNone;
    return valid;
}

AuxiliaryGroups& connected(AuxiliaryGroups& groups, StoredBlocks& stored, Residency& residency) {
    if (stored.exist()) groups.connect_stores(stored, residency);
    return groups;
}

}  // namespace

Core::Core(const CoreConfig& config)
    : config_(checked(config)),
      leases_(config_.max_leases),
      device_(config_.device_blocks),
      host_(config_.host_blocks),
      index_(config_, leases_),
      transfers_(index_.tree()),
      stored_(config_, index_),
      events_(config_, index_, stored_),
      state_(config_, index_, leases_, transfers_),
      windows_(config_, index_, leases_, transfers_),
      device_uses_(),
      external_groups_(config_, device_, leases_, index_, transfers_, device_uses_),
      auxiliary_(state_, windows_, external_groups_),
      residency_(config_, index_, stored_, auxiliary_, device_, host_, events_),
      saver_(config_, index_.tree(), device_, host_, residency_, transfers_),
      store_saver_(config_, index_.tree(), host_, stored_, residency_, transfers_),
      promises_(leases_.records(), config_.block_tokens),
      uses_(index_.tree(), leases_),
      batches_(leases_),
      peers_(config_, device_, leases_, index_, auxiliary_, windows_, transfers_),
      external_(config_, device_, host_, leases_, index_, residency_, stored_, store_saver_,
                transfers_, promises_, device_uses_, external_groups_),
      matching_(config_, index_, auxiliary_, transfers_),
      misses_(config_, index_, promises_),
      fetches_(config_, index_, stored_, matching_, residency_, transfers_),
      publication_(config_, device_, index_, state_, windows_, residency_, saver_, promises_, uses_,
                   external_),
      swaps_(config_, device_, host_, leases_, index_, state_, windows_, auxiliary_, matching_,
             residency_, saver_, transfers_, promises_, uses_, publication_),
      grants_(config_, device_, leases_, index_, state_, windows_, auxiliary_, matching_,
              residency_, saver_, transfers_, publication_, uses_, swaps_, store_saver_, fetches_,
              misses_),
      releases_(config_, device_, leases_, index_, state_, windows_, auxiliary_, residency_,
                transfers_, promises_, uses_, batches_, peers_, swaps_, external_),
      completions_(config_, device_, leases_, index_, state_, auxiliary_, matching_, residency_,
                   transfers_, promises_, publication_, swaps_, store_saver_, external_),
      tiers_(config_, device_, leases_, index_, auxiliary_, residency_, saver_, transfers_,
             promises_, swaps_, store_saver_),
      auxiliary_stores_(connected(auxiliary_, stored_, residency_), matching_),
      decoding_(config_, leases_, peers_, external_, publication_, grants_) {}

Hit Core::match(Tokens tokens, std::string_view context, bool reads, bool writes,
                std::span<const Item> items) {
    check_prompt("match", tokens, items);
    leases_.require_room();
    Lease& lease =
        leases_.open(tokens, index_.enter_context(context), {reads, writes, true, false});
    index_.add_items(lease, items);
    matching_.walk(lease);
    residency_.touch(lease.path);
    auxiliary_.touch_hit(lease.path);
    return {lease.id(), lease.device_hit, lease.host_hit};
}

Core::CachedPart Core::rematch(LeaseId id) {
    Lease& lease = leases_.at(id);
    if (!lease.is(LeaseState::kMatched)) return {lease.computed_tokens, lease.computed_tokens};
    matching_.refresh(lease);
    residency_.touch(lease.path);
    auxiliary_.touch_hit(lease.path);
    return {static_cast<std::uint32_t>(lease.path.size()) * config_.block_tokens,
            static_cast<std::uint32_t>(lease.tokens.size())};
}

Hit Core::would_hit(Tokens tokens, std::string_view context, std::span<const Item> items) const {
    check_prompt("would_hit", tokens, items);
    const std::optional<std::uint32_t> known = index_.find_context(context);
    if (!known) return {0, 0, 0};
    Lease probe;
    probe.context = *known;
    index_.find_items(probe, items);
    matching_.walk(probe, tokens);
    return {0, probe.device_hit, probe.host_hit};
}

std::vector<NodeId> Core::find_path(const char* call, Tokens tokens, std::string_view context,
                                    std::span<const Item> items) const {
    check_prompt(call, tokens, items);
    std::vector<NodeId> path;
    const std::optional<std::uint32_t> known = index_.find_context(context);
    if (!known) return path;
    Lease probe;
    probe.context = *known;
    index_.find_items(probe, items);
    index_.tree().find_path(index_.root_of(probe), tokens.data(), probe.item_keys,
                            tokens.size() / config_.block_tokens, path);
    return path;
}

std::vector<BlockId> Core::hit_blocks(LeaseId id) {
    Lease& lease = leases_.at(id);
    if (lease.has_blocks()) {
        const auto hit = std::min<std::size_t>(lease.device_hit, lease.table.size());
        return {lease.table.begin(), lease.table.begin() + static_cast<std::ptrdiff_t>(hit)};
    }
    std::vector<BlockId> blocks;
    if (!lease.is(LeaseState::kMatched)) return blocks;
    matching_.refresh(lease);
    const auto hit = static_cast<std::ptrdiff_t>(lease.device_hit);
    std::transform(lease.path.begin(), lease.path.begin() + hit, std::back_inserter(blocks),
                   [this](NodeId node) { return index_.tree()[node].device; });
    return blocks;
}

void Core::compute_nothing(LeaseId id, bool whole) {
    Lease& lease = leases_.at(id);
    if (!lease.is(LeaseState::kMatched)) {
        throw LeaseError("the lease is " + std::string(name_of(lease.state)) +
                         "; only before allocate can it become one that computes nothing")
            .of(id);
    }
    lease.flags.computes = false;
    lease.flags.whole = whole;
    if (whole) matching_.walk(lease);
}

BatchId Core::begin_batch(std::span<const LeaseId> ids) {
    for (const LeaseId id : ids) peers_.check_compute(leases_.at(id));
    return batches_.begin(ids);
}

std::vector<LeaseId> Core::end_batch(BatchId id, Step step) {
    const std::vector<LeaseId> ended = batches_.end(id, step);
    for (const LeaseId lease : ended) releases_.end(leases_.at(lease), step);
    return ended;
}

const StoreTransfer& Core::store_transfer(TransferId id) const {
    if (auxiliary_stores_.has(id)) return auxiliary_stores_.get(id);
    if (store_saver_.has(id)) return store_saver_.get(id);
    if (fetches_.has(id)) return fetches_.get(id);
    throw UsageError("no fetch or save " + str(id) + " is in flight");
}

std::vector<LeaseId> Core::complete(TransferId id, Outcome outcome, std::uint32_t first_bad_block,
                                    std::span<const std::uint8_t> results) {
    if (peers_.has(id)) {
        const PeerRelease released = peers_.complete(id, outcome, first_bad_block);
        for (const LeaseId lease : released.ended) releases_.end(leases_.at(lease), 0);
        if (released.lease != 0) finish_state(leases_.at(released.lease), released.state_tokens);
        return released.ended;
    }
    if (store_saver_.has(id)) {
        store_saver_.complete(id, outcome, results);
    } else if (auxiliary_stores_.has(id)) {
        auxiliary_stores_.complete(id, outcome, first_bad_block, results);
    } else if (fetches_.has(id)) {
        fetches_.complete(id, outcome, first_bad_block);
    } else {
        completions_.complete(id, outcome, first_bad_block);
    }
    return external_.exist() ? end_saved() : std::vector<LeaseId>{};
}

std::vector<LeaseId> Core::end_saved() {
    external_.end_retiring();
    const std::vector<LeaseId> ended = external_.saves().take_ended();
    for (const LeaseId lease : ended) releases_.end(leases_.at(lease), 0);
    return ended;
}

std::uint32_t Core::commit_blocks(LeaseId id, std::span<const BlockId> ids, Tokens tokens,
                                  std::span<const BlockId> group_ids, Step step,
                                  std::uint32_t kept_blocks) {
    Lease& lease = leases_.at(id);
    const bool is_first = lease.table.empty();
    const auto end =
        std::min<std::size_t>((lease.table.size() + ids.size()) * config_.block_tokens, kMaxTokens);
    if (lease.tokens.size() + tokens.size() > static_cast<std::size_t>(kMaxTokens)) {
        throw LeaseError("commit_blocks: " + str(tokens.size()) + " tokens at position " +
                         str(lease.tokens.size()) + " exceed the " + std::to_string(kMaxTokens) +
                         " positions of a lease")
            .of(id);
    }
    peers_.check_commit(lease, static_cast<std::int64_t>(end));
    external_.assign(lease, ids, is_first ? static_cast<std::int64_t>(end) : 0, group_ids);
    publication_.append(lease, tokens, {});
    lease.kept_blocks = kept_blocks;
    return publication_.commit(lease, lease.num_tokens, step);
}

bool Core::retire(LeaseId id, std::string_view label) {
    Lease& lease = leases_.at(id);
    if (!external_.can_retire(lease)) return false;
    if (!label.empty()) residency_.on_label(lease, label);
    external_.retire(lease);
    return true;
}

Core::Settled Core::settle() {
    std::vector<LeaseId> ended = end_saved();  // first: it may make leases idle
    return {std::move(ended), external_.saves().take_advanced(), external_.uses().take_idle()};
}

void Core::finish_state(Lease& lease, std::uint32_t num_tokens) {
    if (num_tokens == 0) {
        completions_.lose_sides(lease);
    } else {
        publication_.commit_received(lease, num_tokens);
    }
}

std::uint32_t Core::commit_received(LeaseId id, std::int64_t num_tokens) {
    Lease& lease = leases_.at(id);
    peers_.check_positions(lease, num_tokens);
    if (state_.exists() && num_tokens > static_cast<std::int64_t>(lease.computed_tokens)) {
        throw LeaseError("commit: the recurrent state after " + std::to_string(num_tokens) +
                         " positions was not received")
            .of(id)
            .hint("receive the state instead, which commits the positions");
    }
    peers_.check_windows(lease, "commit", num_tokens);
    return publication_.commit_received(lease, num_tokens);
}

Digest Core::prompt_digest(LeaseId id, std::int64_t num_tokens) const {
    const Lease& lease = leases_.at(id);
    if (num_tokens < 1 || num_tokens > static_cast<std::int64_t>(lease.tokens.size())) {
        throw LeaseError("digest: num_tokens is " + std::to_string(num_tokens) +
                         "; it must be between 1 and the " + str(lease.tokens.size()) +
                         " positions whose tokens are known")
            .of(id);
    }
    return index_.prompt_digest(lease, static_cast<std::uint32_t>(num_tokens));
}

void Core::reset(bool new_weights) {
    external_.saves().reset();
    tiers_.reset(new_weights);
    peers_.end_all();
}

void Core::purge(std::string_view salt) {
    const std::vector<bool> contexts = index_.contexts_of(salt);
    tiers_.purge(contexts);
    external_.saves().purge(contexts);
    fetches_.purge(contexts);
    events_.note_purge();
}

void Core::note_lacking(LeaseId id) {
    for (const Digest& digest : missing(id, 1).digests) events_.note_lacking(digest);
}

Usage Core::usage(LeaseId id) const {
    const Lease& lease = leases_.at(id);
    const std::uint32_t cached = std::min(lease.cached_tokens, lease.prompt_tokens);
    const std::uint32_t device =
        std::min<std::uint64_t>(std::uint64_t{lease.device_hit} * config_.block_tokens, cached);
    const std::uint32_t store = std::min(lease.store_hit * config_.block_tokens, cached);
    return {lease.prompt_tokens, device, cached - device, lease.computed_blocks, store};
}

GroupHit Core::group_hit(LeaseId id, GroupId group) const {
    const Lease& lease = leases_.at(id);
    if (!lease.has_blocks() || lease.cached_tokens == 0) return {};
    if (group == kRecurrentState) return lease.recurrent.hit;
    const auto number = static_cast<std::size_t>(group);
    if (number < lease.external.size()) return lease.external[number].hit;
    return number < lease.windows.size() ? lease.windows[number].hit : GroupHit{};
}

bool Core::is_current(LeaseId id) const {
    const Lease& lease = leases_.at(id);
    return lease.has_blocks() && index_.is_of_epoch(lease) &&
           index_.attached_blocks(lease) == lease.path.size();
}

std::vector<std::uint32_t> Core::snapshot_points(LeaseId id) const {
    const Lease& lease = leases_.at(id);
    return state_.exists() ? matching_.snapshot_points(lease) : std::vector<std::uint32_t>{};
}

const std::vector<BlockId>& Core::table_of(LeaseId id, std::int32_t group) const {
    const Lease& lease = leases_.at(id);
    if (group >= 0) external_.refuse("block_table", "ask the server, which has the tables");
    return group < 0 ? lease.table : windows_.table_of(lease, static_cast<std::size_t>(group));
}

const std::vector<BlockId>& Core::table_if_held(LeaseId id, std::int32_t group) const {
    static const std::vector<BlockId> none;
    return leases_.is_held(id) ? table_of(id, group) : none;
}

std::size_t Core::longest_table(std::span<const LeaseId> ids) const {
    std::size_t longest = 0;
    for (const LeaseId id : ids) longest = std::max(longest, table_if_held(id, -1).size());
    return longest;
}

std::vector<std::int32_t> Core::lengths(std::span<const LeaseId> ids) const {
    std::vector<std::int32_t> lengths;
    lengths.reserve(ids.size());
    for (const LeaseId id : ids) {
        const std::size_t length = leases_.is_held(id) ? leases_.at(id).tokens.size() : 0;
        lengths.push_back(static_cast<std::int32_t>(length));
    }
    return lengths;
}

void Core::block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                        BlockId fill, std::int32_t group) const {
    const std::size_t width = rows == 0 ? 0 : out.size() / rows;
    if (ids.size() > rows) {
        throw UsageError("block_tables: out has " + str(rows) + " rows for " + str(ids.size()) +
                         " leases");
    }
    for (const LeaseId id : ids) {
        if (table_if_held(id, group).size() > width) {
            throw UsageError("block_tables: out has " + str(width) + " columns; the lease has " +
                             str(table_if_held(id, group).size()) + " blocks")
                .of(id);
        }
    }
    for (std::size_t row = 0; row < rows; ++row) {
        const std::span<BlockId> line = out.subspan(row * width, width);
        std::size_t blocks = 0;
        if (row < ids.size()) {
            const std::vector<BlockId>& table = table_if_held(ids[row], group);
            std::copy(table.begin(), table.end(), line.begin());
            blocks = table.size();
        }
        std::fill(line.begin() + static_cast<std::ptrdiff_t>(blocks), line.end(), fill);
    }
}

CoreStatistics Core::statistics() const {
    CoreStatistics s{};
    s.leases = leases_.open_leases();
    s.releasing_leases = leases_.count(LeaseState::kReleasing);
    index_.add_to(s);
    transfers_.add_to(s.attention);
    residency_.add_to(s);
    saver_.add_to(s);
    store_saver_.add_to(s.attention);
    fetches_.add_to(s);
    publication_.add_to(s);
    grants_.add_to(s);
    misses_.add_to(s);
    peers_.add_to(s);
    external_.add_to(s);
    s.index_bytes += stored_.bytes();
    TierCounts& device = s.attention.device;
    device.cached -= transfers_.onloading_blocks();
    device.leased = device.blocks - device.free - device.cached - device.in_flight;
    if (external_.exist()) device.free = 0;
    TierCounts& host = s.attention.host;
    host.cached = host.blocks - host.free - host.in_flight;
    return s;
}

GroupStatistics Core::group_statistics(GroupId group) const {
    GroupStatistics s = auxiliary_.statistics(group);
    peers_.add_to(s, group);
    return s;
}

std::vector<std::string> Core::violations() const {
    Report report(device_.capacity(), host_.capacity(), index_.tree().end_id());
    leases_.check(report);
    fetches_.check(report);
    external_.check(report);
    index_.check(report);
    transfers_.check(report);
    state_.check(report);
    windows_.check(report);
    saver_.check(report);
    store_saver_.check(report);
    promises_.check(report);
    uses_.check(report);
    batches_.check(report);
    peers_.check(report);
    swaps_.check(report);
    residency_.check(report);
    events_.check(report);
    return report.take();
}

}  // namespace aiokv
