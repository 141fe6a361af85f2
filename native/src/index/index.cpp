#include "aiokv/index.hpp"

#include <algorithm>
#include <utility>

#include "aiokv/digest.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

// FNV-1a, because its result is the same in every process, unlike that of std::hash.
std::uint64_t seed_of_key(std::string_view key) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    return hash;
}

void set_spans(Lease& lease, std::span<const Item> items) {
    for (const Item& item : items) {
        const auto start = static_cast<std::uint64_t>(item.offset);
        lease.items.push_back({start, start + static_cast<std::uint64_t>(item.length)});
    }
}

}  // namespace

Index::Index(const CoreConfig& config, const LeaseTable& leases)
    : config_(config),
      leases_(leases),
      tree_(config.block_tokens,
            std::size_t{config.device_blocks} + config.host_blocks + config.history_blocks + 64,
            (config.external_device ? config.host_blocks : config.device_blocks) +
                std::size_t{config.history_blocks},
            config.history_blocks) {
    open_context("");
    contexts_[0].leases = 1;  // so the empty context is never closed
}

// -- contexts --------------------------------------------------------------------------------

std::uint32_t Index::enter_context(std::string_view key) {
    const std::uint32_t context = open_context(key);
    enter_context(context);
    return context;
}

std::uint32_t Index::share_of_salt(std::string_view salt) const {
    const auto found = std::ranges::find(config_.share_salts, salt);
    const auto end = config_.share_salts.end();
    return found == end ? 0 : static_cast<std::uint32_t>(found - config_.share_salts.begin()) + 1;
}

void Index::leave_context(std::uint32_t context) {
    --contexts_[context].leases;
    close_if_unused(context);
}

std::optional<std::uint32_t> Index::find_context(std::string_view key) const {
    if (key.empty()) return 0;
    const auto entry = context_ids_.find(std::string(key));
    return entry == context_ids_.end() ? std::nullopt : std::optional(entry->second);
}

std::uint32_t Index::open_context(std::string_view key) {
    if (key.empty() && !contexts_.empty()) return 0;
    const auto [entry, is_new] = context_ids_.try_emplace(std::string(key), 0);
    if (!is_new) return entry->second;
    close_forgotten_contexts();
    auto index = static_cast<std::uint32_t>(contexts_.size());
    if (free_contexts_.empty()) {
        contexts_.emplace_back();
    } else {
        index = free_contexts_.back();
        free_contexts_.pop_back();
    }
    const NodeId root = tree_.add_root(share_of_salt(salt_of(key)));
    tree_[root].device = static_cast<BlockId>(index);
    contexts_[index] = Context{std::string(key), root, 0, 0, seed_of_key(key)};
    entry->second = index;
    return index;
}

void Index::close_if_unused(std::uint32_t index) {
    Context& context = contexts_[index];
    if (context.leases > 0 || context.growths > 0 || tree_.has_child(context.root)) return;
    if (tree_.evicted().is_below_root(context.root)) return;
    tree_.free(context.root);
    context_ids_.erase(context.key);
    context = Context{};
    free_contexts_.push_back(index);
}

// Closes the contexts of which the history has forgotten the last block.
void Index::close_forgotten_contexts() {
    for (const NodeId root : tree_.evicted().take_bare_roots()) {
        if (tree_.is_live(root) && tree_[root].has(kRoot)) close_context_if_unused(root);
    }
}

void Index::close_unused_contexts() {
    for (std::uint32_t i = 1; i < contexts_.size(); ++i) {
        if (contexts_[i].root != kNone) close_if_unused(i);
    }
}

std::vector<bool> Index::contexts_of(std::string_view salt) const {
    std::vector<bool> found(contexts_.size());
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
        found[i] = contexts_[i].root != kNone && salt_of(contexts_[i].key) == salt;
    }
    return found;
}

void Index::clear_all_but(std::span<const RunId> kept) {
    std::vector<NodeId> roots;
    for_some_roots(contexts_.size(), [&](NodeId root) { roots.push_back(root); });
    tree_.clear(roots, kept);
}

// -- items -----------------------------------------------------------------------------------

void Index::add_items(Lease& lease, std::span<const Item> items) {
    if (items.empty()) return;
    // Positions in keys are relative to their block, so count from the first block that an item
    // touches.
    const auto first = static_cast<std::size_t>(items.front().offset) / config_.block_tokens;
    std::vector<Item> moved(items.begin(), items.end());
    for (Item& item : moved) item.offset -= static_cast<std::int64_t>(first * config_.block_tokens);
    std::vector<std::string> keys = item_key_bytes(moved, config_.block_tokens);
    ItemKeys& known = tree_.item_keys();
    lease.item_keys.resize(std::max(lease.item_keys.size(), first + keys.size()), kNoItems);
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if (keys[i].empty()) continue;
        ItemKey& key = lease.item_keys[first + i];
        const ItemKey before = key;  // items that end in the block where `first` begins
        key = known.intern(before == kNoItems ? std::move(keys[i]) : known.bytes(before) + keys[i]);
        if (before != kNoItems) known.unref(before);
    }
    set_spans(lease, items);
}

void Index::find_items(Lease& lease, std::span<const Item> items) const {
    for (const std::string& bytes : item_key_bytes(items, config_.block_tokens)) {
        lease.item_keys.push_back(bytes.empty() ? kNoItems : tree_.item_keys().find(bytes));
    }
    set_spans(lease, items);
}

void Index::copy_items(const Lease& from, Lease& to) {
    to.items = from.items;
    to.item_keys = from.item_keys;
    for (const ItemKey key : to.item_keys) {
        if (key != kNoItems) tree_.item_keys().ref(key);
    }
}

void Index::forget_items(Lease& lease) {
    for (const ItemKey key : lease.item_keys) {
        if (key != kNoItems) tree_.item_keys().unref(key);
    }
    lease.item_keys.clear();
    lease.items.clear();
}

void Index::cut_items(Lease& lease, std::uint32_t num_tokens) {
    while (!lease.items.empty() && lease.items.back().start >= num_tokens) lease.items.pop_back();
    ItemKeys& keys = tree_.item_keys();
    const std::size_t whole = num_tokens / config_.block_tokens;
    ItemKey last = kNoItems;  // key of the block that is cut
    if (const ItemKey old = key_of(lease.item_keys, whole); old != kNoItems) {
        std::string bytes = item_key_before(keys.bytes(old), num_tokens % config_.block_tokens);
        if (!bytes.empty()) last = keys.intern(std::move(bytes));
    }
    for (std::size_t block = whole; block < lease.item_keys.size(); ++block) {
        if (lease.item_keys[block] != kNoItems) keys.unref(lease.item_keys[block]);
    }
    lease.item_keys.resize(std::min(lease.item_keys.size(), whole));
    if (last != kNoItems) lease.item_keys.push_back(last);
    while (!lease.item_keys.empty() && lease.item_keys.back() == kNoItems) {
        lease.item_keys.pop_back();
    }
}

Digest Index::prompt_digest(const Lease& lease, std::uint32_t num_tokens) const {
    std::string items;
    for (std::uint64_t block = 0; block < lease.item_keys.size(); ++block) {
        const std::uint64_t first = block * config_.block_tokens;
        const ItemKey key = lease.item_keys[block];
        if (first >= num_tokens) break;
        if (key == kNoItems) continue;
        add_beginning_items(tree_.item_keys().bytes(key), first, num_tokens - first, items);
    }
    return aiokv::prompt_digest(contexts_[lease.context].key,
                                std::span(lease.tokens).first(num_tokens), items);
}

// -- leases, statistics and checks -------------------------------------------------------------

std::size_t Index::attached_blocks(const Lease& lease) const {
    std::size_t blocks = lease.path.size();
    while (blocks > 0 && tree_[lease.path[blocks - 1]].has(kDetached)) --blocks;
    return blocks;
}

std::vector<BlockView> Index::blocks() const {
    std::vector<BlockView> views;
    std::vector<NodeId> path;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        if (!tree_.is_live(node) || tree_[node].has(kRoot | kDetached)) continue;
        path.clear();
        NodeId up = node;
        for (; !tree_[up].has(kRoot); up = tree_.parent(up)) path.push_back(up);
        BlockView view{contexts_[static_cast<std::size_t>(tree_[up].device)].key,
                       {},
                       &tree_[node],
                       tree_.refs(node)};
        for (std::size_t i = path.size(); i-- > 0;) {
            const std::int32_t* tokens = tree_.tokens(path[i]);
            view.prefix.insert(view.prefix.end(), tokens, tokens + config_.block_tokens);
        }
        views.push_back(std::move(view));
    }
    return views;
}

void Index::add_to(CoreStatistics& statistics) const {
    statistics.nodes = tree_.live_nodes();
    statistics.index_bytes += tree_.node_bytes() + tree_.fork_bytes();
    statistics.token_bytes = tree_.token_bytes();
}

void Index::check(Report& report) const {
    std::uint64_t item_refs = report.item_refs + tree_.item_keys().nodes();
    std::vector<std::uint32_t> leases(contexts_.size(), 0);
    for (const Lease& lease : leases_) {
        for (const ItemKey key : lease.item_keys) item_refs += key != kNoItems;
        if (lease.is_open()) ++leases[lease.context];
        if (!lease.has_blocks()) continue;
        report.require(lease.table.size() == config_.blocks_for(lease.num_tokens),
                       "I1: a lease of ", lease.num_tokens, " tokens has ", lease.table.size(),
                       " blocks");
        for (const NodeId node : lease.path) ++report.refs[node];
        if (config_.external_device) continue;  // external ids belong to no pool
        for (std::size_t i = 0; i < lease.table.size(); ++i) {
            if (is_private(lease, i)) report.device.own(lease.table[i], "a lease");
        }
    }
    for (std::size_t i = 1; i < contexts_.size(); ++i) {
        report.require(contexts_[i].leases == leases[i], "I5: context ", i, " counts ",
                       contexts_[i].leases, " leases of ", leases[i]);
        const auto growths = report.growths.find(static_cast<std::uint32_t>(i));
        const std::uint32_t growing = growths == report.growths.end() ? 0 : growths->second;
        report.require(contexts_[i].growths == growing, "I5: context ", i, " counts ",
                       contexts_[i].growths, " growths of ", growing);
    }
    tree_.check(report);
    std::size_t nodes_with_items = 0;
    tree_.evicted().for_each([&](const EvictedRuns::Run& run) {
        for (std::uint32_t i = 0; i < run.length; ++i) {
            nodes_with_items += tree_[run.first + i].has(kHasItems);
        }
    });
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot)) continue;
        nodes_with_items += n.has(kHasItems);
        if (n.has(kDetached)) continue;
        const Node& parent = tree_[tree_.parent(node)];
        report.require(
            tree_.find_child(tree_.parent(node), tree_.tokens(node), tree_.items(node)) == node,
            "I2: node ", node, " is not found under its parent");
        report.require(!n.has(kDeviceResident) || parent.has(kRoot | kDeviceResident), "I2: node ",
                       node, " is on the device, its parent is not");
    }
    report.require(nodes_with_items == tree_.item_keys().nodes(), "I5: ", nodes_with_items,
                   " nodes have items, ", tree_.item_keys().nodes(), " are listed");
    report.require(item_refs == tree_.item_keys().total_refs(), "I5: the keys of items count ",
                   tree_.item_keys().total_refs(), " refs of ", item_refs);
}

}  // namespace aiokv
