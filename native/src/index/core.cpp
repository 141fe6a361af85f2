// Handles, contexts, and giving blocks back.
#include "aiokv/core.hpp"

#include <algorithm>

#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {
namespace {

const CoreConfig& checked(const CoreConfig& config) {
    constexpr std::uint32_t kMaxBlocks = 1u << 30;
    if (config.block_tokens == 0) throw ConfigError("block_tokens must be at least 1");
    if (config.device_blocks == 0) throw ConfigError("device_blocks must be at least 1");
    if (config.leave_tokens == 0) throw ConfigError("leave_tokens must be at least 1");
    if (config.device_blocks > kMaxBlocks || config.host_blocks > kMaxBlocks) {
        throw ConfigError("device_blocks and host_blocks must be at most " + str(kMaxBlocks));
    }
    if (config.state_slots > kMaxBlocks) {
        throw ConfigError("state_slots must be at most " + str(kMaxBlocks));
    }
    if (config.max_leases == 0 || config.max_leases > kMaxLeases) {
        throw ConfigError("max_leases is " + str(config.max_leases) +
                          "; it must be between 1 and " + str(kMaxLeases));
    }
    if (config.reserve_blocks >= config.device_blocks) {
        throw ConfigError("reserve_blocks (" + str(config.reserve_blocks) +
                          ") must be below device_blocks (" + str(config.device_blocks) + ")");
    }
    return config;
}

std::optional<ReuseModel> model_of(const CoreConfig& config) {
    if (config.eviction == EvictionKind::kLru) return std::nullopt;
    return ReuseModel(config.block_tokens, std::max(config.device_blocks, config.host_blocks));
}

// Number of released leases whose memory for prompt and table is kept for reuse.
constexpr std::size_t kSpareLeases = 1024;
constexpr std::size_t kSmallBytes = 256;

template <class T>
void shed(std::vector<T>& values) {
    if (values.capacity() * sizeof(T) > kSmallBytes) std::vector<T>().swap(values);
}

// FNV-1a: the same in every process, unlike std::hash.
std::uint64_t seed_of(std::string_view key) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

}  // namespace

Core::Core(const CoreConfig& config)
    : config_(checked(config)),
      tree_(config.block_tokens, std::size_t{config.device_blocks} + config.host_blocks + 64,
            config.device_blocks),
      device_(config.device_blocks),
      host_(config.host_blocks),
      twins_(config.host_blocks),
      reuse_(model_of(config)),
      device_queue_(tree_, reuse_ ? &*reuse_ : nullptr),
      host_queue_(tree_, reuse_ ? &*reuse_ : nullptr) {
    if (reuse_) device_duel_.emplace(*reuse_, config.device_blocks);
    if (reuse_ && config.host_blocks > 0) host_duel_.emplace(*reuse_, config.host_blocks);
    if (config.state_slots > 0) state_.emplace(config.state_slots, 1);
    for (const WindowConfig& window : config.windows) {
        windows_.emplace_back(window, config.block_tokens);
    }
    open_context("");
    contexts_[0].leases = 1;  // the empty context is never closed
}

const Lease& Core::lease(LeaseId id) const {
    const auto slot = static_cast<std::uint32_t>(id);
    if (slot >= leases_.size() || !leases_[slot].live || leases_[slot].generation != id >> 32) {
        throw LeaseError("no such lease: it is released, or belongs to another engine");
    }
    return leases_[slot];
}

Lease& Core::lease_at(LeaseId id) {
    return const_cast<Lease&>(lease(id));
}

std::uint32_t Core::open_context(std::string_view key) {
    if (key.empty() && !contexts_.empty()) return 0;
    const auto [entry, is_new] = context_ids_.try_emplace(std::string(key), 0);
    if (!is_new) return entry->second;
    auto index = static_cast<std::uint32_t>(contexts_.size());
    if (free_contexts_.empty()) {
        contexts_.emplace_back();
    } else {
        index = free_contexts_.back();
        free_contexts_.pop_back();
    }
    const NodeId root = tree_.add_root();
    tree_[root].device = static_cast<BlockId>(index);
    contexts_[index] = Context{std::string(key), root, 0, seed_of(key)};
    entry->second = index;
    return index;
}

void Core::close_context_if_unused(std::uint32_t index) {
    Context& context = contexts_[index];
    if (context.leases > 0 || tree_[context.root].child != kNone) return;
    tree_.free(context.root);
    context_ids_.erase(context.key);
    context = Context{};
    free_contexts_.push_back(index);
}

// Called before anything changes.
void Core::require_lease_slot() const {
    if (!free_leases_.empty() || leases_.size() < config_.max_leases) return;
    throw UsageError(str(config_.max_leases) +
                     " leases are open, which is the limit; release leases");
}

LeaseId Core::open_lease(Tokens tokens, std::uint32_t context, bool reads, bool writes) {
    auto slot = static_cast<std::uint32_t>(leases_.size());
    if (free_leases_.empty()) {
        leases_.emplace_back();
    } else {
        slot = free_leases_.back();
        free_leases_.pop_back();
    }
    Lease& lease = leases_[slot];
    lease.tokens.assign(tokens.begin(), tokens.end());
    lease.context = context;
    lease.slot = slot;
    lease.reads = reads;
    lease.writes = writes;
    lease.live = true;
    ++lease.generation;
    lease.classes.clear();
    lease.prompt_tokens = static_cast<std::uint32_t>(tokens.size());
    lease.grown_blocks = 0;
    lease.computed_blocks = lease.device_hit = lease.host_hit = lease.known_blocks = 0;
    lease.computes = true;
    lease.released = false;
    lease.whole = false;
    ++contexts_[context].leases;
    return (std::uint64_t{lease.generation} << 32) | slot;
}

std::uint32_t Core::blocks_for(std::uint64_t num_tokens) const {
    return static_cast<std::uint32_t>((num_tokens + config_.block_tokens - 1) /
                                      config_.block_tokens);
}

// Another lease could share the block as it is.
bool Core::is_indexed(const Lease& lease, std::size_t index) const {
    return index < lease.path.size() && tree_[lease.path[index]].has(kDeviceValid);
}

bool Core::is_private(const Lease& lease, std::size_t index) const {
    return index >= lease.path.size() || tree_[lease.path[index]].device != lease.table[index];
}

LeaseId Core::truncate(LeaseId id, std::int64_t num_tokens, Step step) {
    Lease& lease = lease_at(id);
    if (!lease.granted) throw LeaseError("cannot truncate a lease before it was allocated");
    const std::int64_t indexed =
        static_cast<std::int64_t>(lease.path.size()) * config_.block_tokens;
    if (lease.swap_out != 0) throw LeaseError("cannot truncate a lease that is being swapped");
    if (has_sides() && num_tokens < lease.computed_tokens) {
        throw LeaseError("cannot truncate to " + std::to_string(num_tokens) +
                         " positions: the recurrent state, or a window, has gone on to " +
                         str(lease.computed_tokens));
    }
    if (num_tokens < indexed || num_tokens > lease.num_tokens) {
        throw LeaseError("cannot truncate to " + std::to_string(num_tokens) +
                         " positions: the lease has " + str(lease.num_tokens) + ", of which " +
                         std::to_string(indexed) + " are shared");
    }
    const auto length = static_cast<std::uint32_t>(num_tokens);
    const bool cuts = blocks_for(length) < lease.table.size();
    if (cuts && lease.batches > 0 && !lease.windows.empty()) {
        throw LeaseError(
            "truncate: a batch computes with the lease, which has sliding windows; let the batch "
            "end first");
    }
    if (blocks_for(length) < lease.path.size() + tail_under_way(id)) {
        throw LeaseError("cannot truncate to " + std::to_string(num_tokens) +
                         " positions: a transfer still writes blocks behind them; await "
                         "layers.wait_all()");
    }
    const bool cuts_prompt = lease.tokens.size() > length;
    for (const ItemSpan& item : lease.items) {
        if (!cuts_prompt || item.start >= length || item.stop <= length) continue;
        throw LeaseError("cannot truncate to " + std::to_string(num_tokens) +
                         " positions: the item at positions " + str(item.start) + " to " +
                         str(item.stop) + " would be cut; truncate to " + str(item.start) +
                         " or less, or to " + str(item.stop) + " or more");
    }
    LeaseId keeper = 0;
    if (cuts && lease.batches > 0) {
        keeper = cut_table(id, lease, blocks_for(length));
    } else {
        for (std::size_t i = blocks_for(length); i < lease.table.size(); ++i) {
            device_.use_in(lease.table[i], last_use(lease, step));
            device_.give_back(lease.table[i]);
        }
    }
    promises_.remove(lease);  // it reads fields of the lease that change below
    lease.table.resize(blocks_for(length));
    lease.num_tokens = length;
    lease.computed_tokens = std::min(lease.computed_tokens, length);
    if (cuts_prompt) {
        lease.tokens.resize(length);
        cut_items(lease, length);
    }
    if (lease.frontier != kNone) promises_.add(lease);
    fit_windows(lease, step);
    return keeper;
}

void Core::set_granted(Lease& lease, bool granted) {
    if (granted == lease.granted) return;
    const std::uint32_t change = granted ? 1 : -1;
    granted_leases_ += change;
    if (lease.computes) computing_leases_ += change;
    lease.granted = granted;
}

void Core::free_table(Lease& lease, Step step) {
    for (std::size_t i = lease.table.size(); i-- > 0;) {
        device_.use_in(lease.table[i], step);
        if (is_private(lease, i)) device_.give_back(lease.table[i]);
        if (i < lease.path.size()) unref(lease.path[i]);
    }
    lease.table.clear();
}

void Core::give_back(LeaseId id, Lease& lease, Step step) {
    step = last_use(lease, step);
    withdraw(lease);
    forget_use(lease);
    if (lease.swapped) drop_swapped(lease);
    if (lease.swap_out != 0) orphan_tail(transfers_.at(lease.swap_out), step);
    if (lease.granted) {
        leave_onloads(id, lease, step);
        free_table(lease, step);
    }
    give_state_back(lease, step);
    give_windows_back(lease, step);
    set_granted(lease, false);
    lease.failed = false;
    lease.num_tokens = lease.computed_tokens = lease.cached_tokens = 0;
    lease.version = 0;
    lease.last_step = 0;
    lease.named = false;
    lease.path.clear();
}

// Back to what match left.
LeaseId Core::retract(LeaseId id, Step step) {
    Lease& lease = lease_at(id);
    const LeaseId keeper = lease.batches > 0 ? set_aside(id, lease) : 0;
    give_back(id, lease, step);
    return keeper;
}

bool Core::release(LeaseId id, Step step, Step used_in) {
    Lease& lease = lease_at(id);
    lease.last_step = std::max(lease.last_step, used_in);
    if (lease.batches > 0) {
        withdraw(lease);
        lease.released = true;
        ++releasing_leases_;
        return false;
    }
    end_lease(id, lease, step);
    return true;
}

void Core::end_lease(LeaseId id, Lease& lease, Step step) {
    give_back(id, lease, step);
    releasing_leases_ -= lease.released;
    lease.released = false;
    lease.live = false;
    forget_items(lease);
    const std::uint32_t context = lease.context;
    if (free_leases_.size() >= kSpareLeases) {
        // Small pieces stay: malloc puts off collecting those, and then collects the pieces of
        // thousands of leases in one call.
        shed(lease.tokens);
        shed(lease.path);
        shed(lease.item_keys);
        shed(lease.items);
        shed(lease.table);
        shed(lease.classes);
        shed(lease.onloads);
        shed(lease.tail_host);
        shed(lease.snapshots);
        shed(lease.windows);
    }
    free_leases_.push_back(static_cast<std::uint32_t>(id));
    --contexts_[context].leases;
    close_context_if_unused(context);
}

Usage Core::usage(LeaseId id) const {
    const Lease& lease = this->lease(id);
    const std::uint32_t cached = std::min(lease.cached_tokens, lease.prompt_tokens);
    const std::uint32_t device =
        std::min<std::uint64_t>(std::uint64_t{lease.device_hit} * config_.block_tokens, cached);
    return {lease.prompt_tokens, device, cached - device, lease.computed_blocks};
}

bool Core::is_current(LeaseId id) const {
    const Lease& lease = this->lease(id);
    return lease.granted && lease.epoch == epoch_ &&
           (lease.path.empty() || !tree_[lease.path.back()].has(kDetached));
}

const std::vector<BlockId>& Core::table_of(LeaseId id, std::int32_t group) const {
    static const std::vector<BlockId> none;
    const Lease& lease = this->lease(id);
    if (group < 0) return lease.table;
    if (static_cast<std::size_t>(group) >= windows_.size()) {
        throw UsageError("there is no window group " + std::to_string(group));
    }
    return lease.windows.empty() ? none : lease.windows[static_cast<std::size_t>(group)].table;
}

void Core::block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                        BlockId fill, std::int32_t group) const {
    const std::size_t width = rows == 0 ? 0 : out.size() / rows;
    if (ids.size() > rows) {
        throw UsageError("out has " + str(rows) + " rows for " + str(ids.size()) + " leases");
    }
    for (const LeaseId id : ids) {
        if (table_of(id, group).size() > width) {
            throw UsageError("out has " + str(width) + " columns; a lease has " +
                             str(table_of(id, group).size()) + " blocks");
        }
    }
    for (std::size_t row = 0; row < rows; ++row) {
        const std::span<BlockId> line = out.subspan(row * width, width);
        std::size_t blocks = 0;
        if (row < ids.size()) {
            const std::vector<BlockId>& table = table_of(ids[row], group);
            std::copy(table.begin(), table.end(), line.begin());
            blocks = table.size();
        }
        std::fill(line.begin() + static_cast<std::ptrdiff_t>(blocks), line.end(), fill);
    }
}

}  // namespace aiokv
