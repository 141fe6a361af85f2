// Leases: match, allocate, commit, extend, release.
#include "aiokv/core.hpp"

#include <algorithm>
#include <limits>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

std::string str(std::uint64_t value) {
    return std::to_string(value);
}

ItemKey key_of(const std::vector<ItemKey>& keys, std::size_t block) {
    return block < keys.size() ? keys[block] : kNoItems;
}

const CoreConfig& checked(const CoreConfig& config) {
    constexpr std::uint32_t kMaxBlocks = 1u << 30;
    if (config.block_tokens == 0) throw ConfigError("block_tokens must be at least 1");
    if (config.device_blocks == 0) throw ConfigError("device_blocks must be at least 1");
    if (config.leave_tokens == 0) throw ConfigError("leave_tokens must be at least 1");
    if (config.device_blocks > kMaxBlocks || config.host_blocks > kMaxBlocks) {
        throw ConfigError("device_blocks and host_blocks must be at most " + str(kMaxBlocks));
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
      reuse_(model_of(config)),
      device_queue_(tree_, config.device_blocks, reuse_ ? &*reuse_ : nullptr),
      host_queue_(tree_, config.host_blocks, reuse_ ? &*reuse_ : nullptr) {
    open_context("");
    contexts_[0].leases = 1;  // the empty context is never closed
}

// -- handles and contexts --------------------------------------------------------------------

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

// -- match and allocate ----------------------------------------------------------------------

Hit Core::match(Tokens tokens, std::string_view context, bool reads, bool writes,
                std::span<const Item> items) {
    if (tokens.empty()) throw UsageError("cannot match an empty prompt");
    if (tokens.size() > static_cast<std::size_t>(kMaxTokens)) {
        throw UsageError("a prompt of " + str(tokens.size()) + " tokens is too long");
    }
    check_items(items, tokens.size());
    const LeaseId id = open_lease(tokens, open_context(context), reads, writes);
    Lease& lease = leases_[static_cast<std::uint32_t>(id)];
    if (!items.empty()) set_items(lease, items);
    walk(lease);
    touch(lease.path);
    return {id, lease.device_hit, lease.host_hit};
}

LeaseId Core::open_lease(Tokens tokens, std::uint32_t context, bool reads, bool writes) {
    auto slot = static_cast<std::uint32_t>(leases_.size());
    if (free_leases_.empty()) {
        if (slot == kMaxLeases) throw UsageError(str(kMaxLeases) + " leases are out already");
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
    ++contexts_[context].leases;
    return (std::uint64_t{lease.generation} << 32) | slot;
}

std::size_t Core::hit_limit(const Lease& lease) const {
    const std::size_t length = lease.tokens.size();
    if (!lease.reads || length < config_.leave_tokens) return 0;
    return (length - config_.leave_tokens) / config_.block_tokens;
}

// -- multimodal items ------------------------------------------------------------------------

void Core::set_items(Lease& lease, std::span<const Item> items) {
    for (std::string& bytes : item_key_bytes(items, config_.block_tokens)) {
        const bool none = bytes.empty();
        lease.item_keys.push_back(none ? kNoItems : tree_.item_keys().intern(std::move(bytes)));
    }
    for (const Item& item : items) {
        const auto start = static_cast<std::uint64_t>(item.offset);
        lease.items.push_back({start, start + static_cast<std::uint64_t>(item.length)});
    }
}

void Core::forget_items(Lease& lease) {
    for (const ItemKey key : lease.item_keys) {
        if (key != kNoItems) tree_.item_keys().unref(key);
    }
    lease.item_keys.clear();
    lease.items.clear();
}

// `blocks`, or fewer, so that they do not end inside an item: an encoder makes an item whole.
std::size_t Core::before_cut_item(const Lease& lease, std::size_t blocks) const {
    for (auto item = lease.items.rbegin(); item != lease.items.rend(); ++item) {
        const std::uint64_t end = std::uint64_t{blocks} * config_.block_tokens;
        if (item->start < end && end < item->stop) blocks = item->start / config_.block_tokens;
    }
    return blocks;
}

// -- walking ---------------------------------------------------------------------------------

// Path, device_hit and host_hit: the longest cached prefix that leaves something to compute.
void Core::walk(Lease& lease) {
    const std::size_t limit = hit_limit(lease);
    const std::int32_t* tokens = lease.tokens.data();
    NodeId node = root_of(lease);
    lease.path.clear();
    lease.device_hit = 0;
    for (std::size_t i = 0; i < limit; ++i, tokens += config_.block_tokens) {
        node = tree_.find_child(node, tokens, key_of(lease.item_keys, i));
        if (node == kNone) break;
        lease.path.push_back(node);
        lease.device_hit += tree_[node].has(kDeviceValid);
    }
    const std::size_t whole = before_cut_item(lease, lease.path.size());
    while (lease.path.size() > whole) {
        lease.device_hit -= tree_[lease.path.back()].has(kDeviceValid);
        lease.path.pop_back();
    }
    lease.host_hit = static_cast<std::uint32_t>(lease.path.size()) - lease.device_hit;
    lease.version = version_;
}

// Most recently used, deepest least so: a child is always evicted before its parent.
void Core::touch(const std::vector<NodeId>& path) {
    for (std::size_t i = path.size(); i-- > 0;) {
        if (!tree_[path[i]].has(kQueued | kParked)) continue;
        dequeue(path[i]);
        enqueue(path[i]);
    }
}

// -- promises --------------------------------------------------------------------------------

// The longest run of full blocks behind the match that one granted lease will compute.
Pending Core::pending(LeaseId id) {
    Lease& lease = lease_at(id);
    if (lease.granted || lease.swapped || promises_.empty()) return {0, 0};
    if (lease.version != version_) walk(lease);
    const std::size_t first = lease.path.size();
    const std::size_t limit = hit_limit(lease);
    const NodeId end = first == 0 ? root_of(lease) : lease.path.back();
    Pending best{0, 0};
    const auto [begin, last] = promises_.equal_range(end);
    for (auto promise = begin; promise != last; ++promise) {
        const Lease& owner = leases_[promise->second];
        const std::size_t stop =
            std::min(limit, owner.tokens.size() / config_.block_tokens) * config_.block_tokens;
        std::size_t same = first * config_.block_tokens;
        while (same < stop && owner.tokens[same] == lease.tokens[same]) ++same;
        std::size_t block = first;
        while (block < same / config_.block_tokens &&
               key_of(owner.item_keys, block) == key_of(lease.item_keys, block)) {
            ++block;
        }
        const auto blocks = static_cast<std::uint32_t>(block - first);
        if (blocks > best.blocks) {
            best = {(std::uint64_t{owner.generation} << 32) | owner.slot, blocks};
        }
    }
    return best;
}

// Others may wait for what this lease will publish next.
void Core::announce(Lease& lease) {
    withdraw(lease);
    if (!lease.writes || lease.failed || lease.epoch != epoch_) return;
    if (lease.path.size() >= lease.tokens.size() / config_.block_tokens) return;
    lease.frontier = lease.path.empty() ? root_of(lease) : lease.path.back();
    promises_.emplace(lease.frontier, lease.slot);
}

void Core::withdraw(Lease& lease) {
    if (lease.frontier == kNone) return;
    const auto [begin, last] = promises_.equal_range(lease.frontier);
    for (auto promise = begin; promise != last; ++promise) {
        if (promise->second != lease.slot) continue;
        promises_.erase(promise);
        break;
    }
    lease.frontier = kNone;
}

// A host hit that is not worth its transfer is computed again; one under way is joined.
void Core::drop_small_onload(Lease& lease) {
    std::size_t resident = 0;
    while (resident < lease.path.size() && tree_[lease.path[resident]].has(kDeviceResident)) {
        ++resident;
    }
    lease.path.resize(resident);
    lease.version = 0;
}

// The path that a grant will take: no more than `usable` blocks, and no onload not worth it.
void Core::choose_path(Lease& lease, std::size_t usable) {
    if (lease.version != version_) walk(lease);
    if (lease.host_hit < config_.min_onload_blocks) drop_small_onload(lease);
    usable = before_cut_item(lease, std::min(usable, lease.path.size()));
    if (lease.path.size() <= usable) return;
    lease.path.resize(usable);
    lease.version = 0;  // a later try may want the rest
}

std::uint32_t Core::blocks_for(std::uint64_t num_tokens) const {
    return static_cast<std::uint32_t>((num_tokens + config_.block_tokens - 1) /
                                      config_.block_tokens);
}

void Core::check_request(LeaseId id, std::int64_t num_tokens) const {
    const Lease& lease = this->lease(id);
    if (lease.granted) throw LeaseError("the lease has its blocks already; use extend");
    if (num_tokens < 1 || num_tokens > kMaxTokens) {
        throw LeaseError("cannot allocate " + std::to_string(num_tokens) + " positions");
    }
    if (lease.swapped && num_tokens < lease.computed_tokens) {
        throw LeaseError("the swapped lease has " + str(lease.computed_tokens) +
                         " computed positions; cannot resume it with " +
                         std::to_string(num_tokens));
    }
    const std::uint32_t total = blocks_for(static_cast<std::uint64_t>(num_tokens));
    if (std::uint64_t{total} + config_.reserve_blocks <= device_.capacity()) return;
    throw RequestTooLarge(std::to_string(num_tokens) + " positions need " + str(total) +
                          " blocks of " + str(config_.block_tokens) + " tokens; device_blocks is " +
                          str(device_.capacity()) + ", of which reserve_blocks keeps " +
                          str(config_.reserve_blocks));
}

// kNone, holding nothing, when there is not enough room now.
Grant Core::allocate(LeaseId id, std::int64_t num_tokens) {
    check_request(id, num_tokens);
    Lease& lease = lease_at(id);
    const std::uint32_t total = blocks_for(static_cast<std::uint64_t>(num_tokens));
    if (lease.swapped) {
        trim_swapped(lease);
    } else {
        choose_path(lease, static_cast<std::size_t>(num_tokens) / config_.block_tokens);
    }

    // Refs first: what the lease hits must not be evicted to make room for the rest of it.
    std::uint32_t resident = 0;
    for (const NodeId node : lease.path) {
        Node& n = tree_[node];
        resident += n.has(kDeviceResident);
        if (n.refs++ == 0) dequeue(node);
    }
    const std::uint32_t needed = total - resident;
    if (needed + config_.reserve_blocks > device_.free_blocks() + evictable() ||
        !make_room(needed)) {
        for (std::size_t i = lease.path.size(); i-- > 0;) unref(lease.path[i]);
        return Grant::kNone;
    }
    lease.num_tokens = static_cast<std::uint32_t>(num_tokens);
    take_blocks(id, lease, total);
    return lease.onloads.empty() ? Grant::kReady : Grant::kLoading;
}

// The model sees a prompt once, when it is granted.
void Core::classify(Lease& lease) {
    if (!reuse_) return;
    if (lease.classes.empty()) {
        reuse_->observe(lease.tokens, contexts_[lease.context].seed, lease.classes);
        device_queue_.refresh();
        host_queue_.refresh();
    }
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        tree_[lease.path[i]].reuse_class = reuse_->class_at(lease.classes, i);
    }
}

// Path nodes hold the lease's refs already, and the pool has the ids.
void Core::take_blocks(LeaseId id, Lease& lease, std::uint32_t total_blocks) {
    const auto hits = static_cast<std::uint32_t>(lease.path.size());
    std::uint32_t resident = 0;
    lease.table.resize(total_blocks);
    lease.device_hit = 0;
    for (; resident < hits && tree_[lease.path[resident]].has(kDeviceResident); ++resident) {
        const Node& node = tree_[lease.path[resident]];
        count_use(lease.path[resident]);
        lease.table[resident] = node.device;
        lease.device_hit += node.has(kDeviceValid);
        if (node.has(kDeviceValid)) continue;
        if (lease.onloads.empty() || lease.onloads.back() != node.next) {
            lease.onloads.push_back(node.next);
            transfers_.at(node.next).leases.push_back(id);
        }
    }
    device_.take(std::span(lease.table).subspan(resident));
    lease.host_hit = hits - lease.device_hit;
    if (!lease.swapped) lease.computed_tokens = hits * config_.block_tokens;
    lease.cached_tokens = lease.computed_tokens;
    lease.epoch = epoch_;
    lease.granted = true;
    classify(lease);
    counters_.hit_device_tokens += std::uint64_t{lease.device_hit} * config_.block_tokens;
    counters_.hit_host_tokens += std::uint64_t{lease.host_hit} * config_.block_tokens;
    counters_.prompt_tokens += lease.tokens.size();
    ++counters_.grants;
    if (resident < hits || !lease.tail_host.empty()) start_onload(id, lease, resident);
    if (lease.swapped) {
        lease.swapped = false;
        for (const NodeId node : lease.path) unhold(node);
    }
    announce(lease);
}

void Core::append(LeaseId id, Tokens tokens) {
    Lease& lease = lease_at(id);
    if (lease.tokens.size() + tokens.size() > lease.num_tokens) {
        throw LeaseError("cannot name " + str(tokens.size()) + " tokens after position " +
                         str(lease.tokens.size()) + ": the lease has " + str(lease.num_tokens) +
                         " positions");
    }
    lease.tokens.insert(lease.tokens.end(), tokens.begin(), tokens.end());
}

// All leases get `num_tokens` more positions, or none does.
bool Core::extend(std::span<const LeaseId> ids, std::int64_t num_tokens) {
    if (num_tokens < 0 || num_tokens > kMaxTokens) {
        throw LeaseError("cannot extend by " + std::to_string(num_tokens) + " positions");
    }
    const auto more = static_cast<std::uint64_t>(num_tokens);
    std::uint64_t needed = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const Lease& lease = this->lease(ids[i]);
        if (!lease.granted || lease.swap_out != 0) {
            throw LeaseError("cannot extend a lease that is not allocated, or is being swapped");
        }
        if (lease.num_tokens + more > kMaxTokens) throw LeaseError("the lease grows too long");
        needed += blocks_for(lease.num_tokens + more) - lease.table.size();
    }
    std::vector<LeaseId> sorted(ids.begin(), ids.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
        throw LeaseError("a lease stands twice in one extend");
    }
    if (needed > device_.free_blocks() + evictable()) return false;
    if (!make_room(static_cast<std::uint32_t>(needed))) return false;
    for (const LeaseId id : ids) {
        Lease& lease = lease_at(id);
        const std::size_t old = lease.table.size();
        lease.num_tokens += static_cast<std::uint32_t>(more);
        lease.table.resize(blocks_for(lease.num_tokens));
        device_.take(std::span(lease.table).subspan(old));
    }
    return true;
}

// -- commit ----------------------------------------------------------------------------------

std::uint32_t Core::commit(LeaseId id, std::int64_t num_tokens, Step step) {
    Lease& lease = lease_at(id);
    if (!lease.granted) throw LeaseError("cannot commit a lease before it was allocated");
    if (lease.swap_out != 0) throw LeaseError("cannot commit a lease that is being swapped");
    if (num_tokens < 0 || num_tokens > lease.num_tokens) {
        throw LeaseError("cannot commit " + std::to_string(num_tokens) +
                         " positions of a lease that has " + str(lease.num_tokens));
    }
    const auto computed = static_cast<std::uint32_t>(num_tokens);
    if (lease.failed || computed <= lease.computed_tokens) return publish(lease);
    if (step > device_.finished_step()) {
        for (std::size_t i = lease.computed_tokens / config_.block_tokens; i < blocks_for(computed);
             ++i) {
            device_.use_in(lease.table[i], step);
        }
    }
    lease.computed_tokens = computed;
    return publish(lease);
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

// -- giving back -----------------------------------------------------------------------------

// Another lease could share the block as it is.
bool Core::is_indexed(const Lease& lease, std::size_t index) const {
    return index < lease.path.size() && tree_[lease.path[index]].has(kDeviceValid);
}

bool Core::is_private(const Lease& lease, std::size_t index) const {
    return index >= lease.path.size() || tree_[lease.path[index]].device != lease.table[index];
}

void Core::truncate(LeaseId id, std::int64_t num_tokens, Step step) {
    Lease& lease = lease_at(id);
    if (!lease.granted) throw LeaseError("cannot truncate a lease before it was allocated");
    const std::int64_t indexed =
        static_cast<std::int64_t>(lease.path.size()) * config_.block_tokens;
    if (lease.swap_out != 0) throw LeaseError("cannot truncate a lease that is being swapped");
    if (num_tokens < indexed || num_tokens > lease.num_tokens) {
        throw LeaseError("cannot truncate to " + std::to_string(num_tokens) +
                         " positions: the lease has " + str(lease.num_tokens) + ", of which " +
                         std::to_string(indexed) + " are shared");
    }
    const auto length = static_cast<std::uint32_t>(num_tokens);
    for (std::size_t i = blocks_for(length); i < lease.table.size(); ++i) {
        device_.use_in(lease.table[i], step);
        device_.give_back(lease.table[i]);
    }
    lease.table.resize(blocks_for(length));
    lease.num_tokens = length;
    lease.computed_tokens = std::min(lease.computed_tokens, length);
    if (lease.tokens.size() > length) lease.tokens.resize(length);
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
    withdraw(lease);
    if (lease.swapped) drop_swapped(lease);
    if (lease.swap_out != 0) orphan_tail(transfers_.at(lease.swap_out), step);
    if (lease.granted) {
        leave_onloads(id, lease, step);
        free_table(lease, step);
    }
    lease.granted = lease.failed = false;
    lease.num_tokens = lease.computed_tokens = lease.cached_tokens = 0;
    lease.version = 0;
    lease.path.clear();
}

// Back to what match left: for a grant whose waiter was cancelled.
void Core::retract(LeaseId id, Step step) {
    give_back(id, lease_at(id), step);
}

void Core::release(LeaseId id, Step step) {
    Lease& lease = lease_at(id);
    give_back(id, lease, step);
    lease.live = false;
    forget_items(lease);
    free_leases_.push_back(static_cast<std::uint32_t>(id));
    --contexts_[lease.context].leases;
    close_context_if_unused(lease.context);
}

bool Core::is_shared(LeaseId id) const {
    const Lease& lease = this->lease(id);
    return lease.granted && !lease.path.empty() && tree_[lease.path.back()].refs > 1;
}

void Core::block_tables(std::span<const LeaseId> ids, std::span<BlockId> out, std::size_t rows,
                        BlockId fill) const {
    const std::size_t width = rows == 0 ? 0 : out.size() / rows;
    if (ids.size() > rows) {
        throw UsageError("out has " + str(rows) + " rows for " + str(ids.size()) + " leases");
    }
    for (const LeaseId id : ids) {
        if (lease(id).table.size() > width) {
            throw UsageError("out has " + str(width) + " columns; a lease has " +
                             str(lease(id).table.size()) + " blocks");
        }
    }
    for (std::size_t row = 0; row < rows; ++row) {
        const std::span<BlockId> line = out.subspan(row * width, width);
        std::size_t blocks = 0;
        if (row < ids.size()) {
            const std::vector<BlockId>& table = lease(ids[row]).table;
            std::copy(table.begin(), table.end(), line.begin());
            blocks = table.size();
        }
        std::fill(line.begin() + static_cast<std::ptrdiff_t>(blocks), line.end(), fill);
    }
}

// The first position to compute again after a failed onload, or -1 when none failed.
std::int64_t Core::recompute_from(LeaseId id) {
    Lease& lease = lease_at(id);
    if (!lease.failed) return -1;
    if (!lease.onloads.empty()) {
        throw LeaseError("transfers still write blocks of this lease; await layers.wait_all()");
    }
    lease.failed = false;
    return lease.cached_tokens;
}

}  // namespace aiokv
