#include "aiokv/external_saves.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

std::uint64_t mixed(std::uint64_t hash, std::uint64_t value) {
    hash = (hash ^ value) * 0xff51afd7ed558ccd;
    return hash ^ (hash >> 32);
}

std::uint64_t token_hash(Tokens tokens, ItemKey items) {
    std::uint64_t hash = 0x9e3779b97f4a7c15 ^ items;
    for (const std::int32_t token : tokens) hash = mixed(hash, static_cast<std::uint32_t>(token));
    return hash;
}

// Returns the key of a block and of all blocks before it, for a sketch.
Digest sketch_digest(std::uint64_t chain) {
    const std::array<std::uint64_t, 2> words = {mixed(chain, 1), mixed(chain, 2)};
    Digest digest{};
    std::memcpy(digest.data(), words.data(), sizeof(words));
    return digest;
}

}  // namespace

ExternalSaves::ExternalSaves(const CoreConfig& config, const DevicePool& device, RunPool& host,
                             LeaseTable& leases, Index& index, Residency& residency,
                             StoreSaver& store_saver, TransferLedger& transfers, Promises& promises,
                             DeviceUses& uses, ExternalGroups& groups)
    : config_(config),
      device_(device),
      host_(host),
      leases_(leases),
      index_(index),
      residency_(residency),
      store_saver_(store_saver),
      transfers_(transfers),
      promises_(promises),
      uses_(uses),
      groups_(groups) {
    if (config.external_device && config.write_policy == SavePolicy::kNthUse) {
        offered_.emplace(2 * (std::uint64_t{config.device_blocks} + config.host_blocks),
                         config.write_uses);
    }
}

// -- what is saved -----------------------------------------------------------------------------

// Returns the number of leading blocks that can be saved: computed, full, and with known tokens and
// device ids. Counts their uses, if the policy needs that.
std::size_t ExternalSaves::target(Lease& lease) {
    const std::size_t size = config_.block_tokens;
    const std::size_t named = std::min<std::size_t>(lease.computed_tokens, lease.tokens.size());
    const std::size_t blocks = std::min(named / size, lease.table.size());
    if (offered_) count_uses(lease, blocks);
    return blocks;
}

// Counts each block once per lease. Leading blocks with enough uses become due.
void ExternalSaves::count_uses(Lease& lease, std::size_t blocks) {
    const std::size_t size = config_.block_tokens;
    if (lease.counted_blocks == 0) lease.use_hash = index_.seed_of(lease);
    for (; lease.counted_blocks < blocks; ++lease.counted_blocks) {
        const std::size_t block = lease.counted_blocks;
        const Tokens tokens = Tokens(lease.tokens).subspan(block * size, size);
        lease.use_hash = mixed(lease.use_hash, token_hash(tokens, key_of(lease.item_keys, block)));
        const std::uint32_t uses = offered_->count(sketch_digest(lease.use_hash)) + 1;
        if (lease.due_blocks == block && uses >= config_.write_uses) {
            ++lease.due_blocks;
        }
    }
}

std::uint32_t ExternalSaves::publish(Lease& lease) {
    lease.retires = false;
    const std::uint32_t queued = queue_blocks(lease);
    // The server may reuse ids behind a window when their positions are committed.
    if (groups_.exist()) groups_.forget_ids(lease, lease.computed_tokens / config_.block_tokens);
    return queued;
}

std::uint32_t ExternalSaves::queue_blocks(Lease& lease) {
    if (!lease.flags.writes || !index_.is_of_epoch(lease) || lease.is(LeaseState::kFailed)) {
        return 0;
    }
    if (!lease.onloads.empty()) return 0;  // computed blocks depend on the bytes of onloads
    if (const std::size_t attached = index_.attached_blocks(lease); attached < lease.path.size()) {
        note_changed(lease);
        leave(lease);
        residency_.unref(std::span(lease.path).subspan(attached));
        lease.path.resize(attached);
    }
    const std::size_t size = config_.block_tokens;
    const std::size_t end = before_written(lease, target(lease));
    const bool saves = config_.write_policy != SavePolicy::kNone && !lease.save_failed;
    const bool has_groups = groups_.exist();
    std::optional<bool> evicts;
    std::uint32_t queued = 0;
    const auto is_due = [&](std::size_t block) {
        return saves && (!offered_ || block < lease.due_blocks);
    };
    const std::size_t first = lease.path.size();
    const std::size_t known_ids = queued_ids_.size();
    if (lease.saving.empty()) join_indexed(lease, end);
    for (std::size_t block = first; has_groups && block < lease.path.size(); ++block) {
        if (is_due(block)) queued += groups_.save(lease, block, lease.path[block]);
    }
    for (std::size_t block = lease.path.size() + lease.saving.size(); block < end; ++block) {
        const Tokens tokens = Tokens(lease.tokens).subspan(block * size, size);
        const ItemKey items = key_of(lease.item_keys, block);
        const NodeId last = lease.path.empty() ? index_.root_of(lease) : lease.path.back();
        const Place above = lease.saving.empty() ? Place{last} : kSaveBit | lease.saving.back();
        const std::uint64_t hash = token_hash(tokens, items);
        SaveId id = find(above, hash, tokens, items);
        if (id == kNone) {
            if (!is_due(block)) break;
            if (!evicts && queue_.size() >= host_.free_blocks()) {
                evicts = should_evict(lease, end);
                if (!*evicts) break;
            }
            id = queue(lease, block, above, hash);
            ++queued;
        }
        blocks_[id].leases.push_back(lease.id());
        lease.saving.push_back(id);
        if (has_groups && is_due(block)) queued += groups_.save(lease, block, kSaveBit | id);
    }
    uses_.begin_read(std::span(queued_ids_).subspan(known_ids), lease.id());
    announce_changed();
    return queued;
}

// Extends the path of a lease by the blocks that other leases or stores have brought, up to `end`.
void ExternalSaves::join_indexed(Lease& lease, std::size_t end) {
    const std::size_t old = lease.path.size();
    if (old >= end) return;
    const NodeId last = old == 0 ? index_.root_of(lease) : lease.path.back();
    index_.tree().find_path(last, &lease.tokens[old * config_.block_tokens],
                            keys_from(lease.item_keys, old), end - old, lease.path);
    const auto joined = std::span(lease.path).subspan(old);
    if (joined.empty()) return;
    note_changed(lease);
    residency_.ref(joined);
    residency_.note_use(lease, static_cast<std::uint32_t>(old), joined);
}

// Returns true if host blocks should be evicted for the copies of a lease. A copy of a block that
// the server keeps is of no use itself, but a copy behind it cannot be hit without it. So the
// blocks that the server may lose have to be at least as many as the kept ones that only this lease
// needs.
bool ExternalSaves::should_evict(const Lease& lease, std::size_t end) const {
    const PrefixTree& tree = index_.tree();
    const std::size_t kept = std::min<std::size_t>(lease.kept_blocks, end);
    std::size_t first = kept;
    for (; first > 0; --first) {
        const std::size_t known = lease.path.size();
        if (first <= known && tree.children(lease.path[first - 1]) > (first < known ? 1 : 0)) break;
    }
    return end > kept && end - kept >= kept - first;
}

// Returns the number of blocks before the first one that an onload writes. Later blocks were
// computed from bytes that may never arrive.
std::size_t ExternalSaves::before_written(Lease& lease, std::size_t blocks) {
    if (!uses_.has_writes() || lease.path.size() + lease.saving.size() >= blocks) return blocks;
    if (groups_.exist() && groups_.awaits_onload(lease)) {
        postponed_.insert(lease.id());
        return 0;
    }
    const auto end = lease.table.begin() + static_cast<std::ptrdiff_t>(blocks);
    const auto written =
        std::find_if(lease.table.begin(), end, [this](BlockId id) { return uses_.is_written(id); });
    if (written != end) postponed_.insert(lease.id());
    return static_cast<std::size_t>(written - lease.table.begin());
}

void ExternalSaves::publish_postponed() {
    for (const LeaseId id : std::exchange(postponed_, {})) {
        // A released lease is skipped: it may be idle, and its ids reused.
        if (leases_.is_open(id) && leases_.at(id).is(LeaseState::kGranted)) publish(leases_.at(id));
    }
}

void ExternalSaves::announce(Lease& lease) {
    promises_.withdraw(lease);
    // Other policies save a block at a later use, so no lease should wait for it.
    if (config_.write_policy != SavePolicy::kWriteThrough || lease.save_failed) return;
    if (!lease.flags.writes || !index_.is_of_epoch(lease) || lease.is(LeaseState::kFailed)) return;
    if (lease.retires) return;  // it may publish no more
    if (!lease.has_blocks() || (lease.is(LeaseState::kReleasing) && lease.saving.empty())) return;
    if (lease.path.size() >= lease.tokens.size() / config_.block_tokens) return;
    lease.frontier = lease.path.empty() ? index_.root_of(lease) : lease.path.back();
    promises_.add(lease);
}

void ExternalSaves::note_changed(Lease& lease) {
    promises_.withdraw(lease);
    changed_.push_back(lease.id());
}

void ExternalSaves::announce_changed() {
    if (changed_.empty()) return;
    std::sort(changed_.begin(), changed_.end());
    const auto end = std::unique(changed_.begin(), changed_.end());
    std::for_each(changed_.begin(), end, [this](LeaseId id) { announce(leases_.at(id)); });
    changed_.clear();
}

void ExternalSaves::leave(Lease& lease) {
    for (const SaveId id : lease.saving) std::erase(blocks_[id].leases, lease.id());
    lease.saving.clear();
    postponed_.erase(lease.id());
}

void ExternalSaves::retire(Lease& lease) {
    promises_.withdraw(lease);
    postponed_.erase(lease.id());
    lease.retires = true;
}

void ExternalSaves::keep_promise(Lease& lease) {
    const std::size_t blocks = lease.path.size() + lease.saving.size();
    promises_.withdraw(lease);
    lease.tokens.resize(std::min(lease.tokens.size(), blocks * config_.block_tokens));
    announce(lease);
}

void ExternalSaves::hand_over(Lease& lease, Lease& keeper) {
    for (const SaveId id : lease.saving) {
        std::vector<LeaseId>& leases = blocks_[id].leases;
        std::replace(leases.begin(), leases.end(), lease.id(), keeper.id());
    }
    keeper.saving = std::exchange(lease.saving, {});
}

void ExternalSaves::note_overwritten(BlockId device) {
    for (SaveId id = 0; id < blocks_.size(); ++id) {
        Block& block = blocks_[id];
        if (block.device != device) continue;
        if (block.state == State::kQueued) lose(id);
        if (block.state == State::kCopying) block.overwritten = true;
    }
    groups_.note_overwritten(device);
    announce_changed();
}

// -- blocks that are being saved -----------------------------------------------------------------

std::size_t ExternalSaves::bucket_of(Place above, std::uint64_t token_hash) const {
    return mixed(token_hash, above) & (buckets_.size() - 1);
}

void ExternalSaves::put_in_bucket(SaveId id) {
    Block& block = blocks_[id];
    SaveId& head = buckets_[bucket_of(block.above, block.token_hash)];
    block.next_in_bucket = std::exchange(head, id);
    block.is_in_bucket = true;
}

// Doubles the number of buckets.
void ExternalSaves::add_buckets() {
    buckets_.assign(std::max<std::size_t>(2 * buckets_.size(), 256), kNone);
    for (SaveId id = 0; id < blocks_.size(); ++id) {
        if (blocks_[id].is_in_bucket) put_in_bucket(id);
    }
}

SaveId ExternalSaves::find(Place above, std::uint64_t token_hash, Tokens tokens,
                           ItemKey items) const {
    if (buckets_.empty()) return kNone;
    for (SaveId id = buckets_[bucket_of(above, token_hash)]; id != kNone;) {
        const Block& block = blocks_[id];
        if (block.token_hash == token_hash && block.above == above && block.items == items &&
            std::equal(tokens.begin(), tokens.end(), block.tokens.begin())) {
            return id;
        }
        id = block.next_in_bucket;
    }
    return kNone;
}

SaveId ExternalSaves::queue(Lease& lease, std::size_t depth, Place above,
                            std::uint64_t token_hash) {
    auto id = static_cast<SaveId>(blocks_.size());
    if (free_.empty()) {
        blocks_.emplace_back();
        if (blocks_.size() > buckets_.size()) add_buckets();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    const std::size_t size = config_.block_tokens;
    const Tokens tokens = Tokens(lease.tokens).subspan(depth * size, size);
    Block& block = blocks_[id];
    block.state = State::kQueued;
    block.overwritten = false;
    block.epoch = index_.epoch();
    block.context = lease.context;
    block.depth = static_cast<std::uint32_t>(depth);
    block.tokens.assign(tokens.begin(), tokens.end());
    block.items = key_of(lease.item_keys, depth);
    block.token_hash = token_hash;
    block.device = lease.table[depth];
    block.host = kNoBlock;
    block.reader = lease.id();
    if (block.items != kNoItems) index_.tree().item_keys().ref(block.items);
    link(id, above);
    queue_.push_back(id);
    queued_ids_.push_back(block.device);
    return id;
}

// Links a block to its place. A node is held from now on; a block that is being saved lists the
// block.
void ExternalSaves::link(SaveId id, Place above) {
    Block& block = blocks_[id];
    block.above = above;
    put_in_bucket(id);
    if ((above & kSaveBit) != 0) {
        blocks_[static_cast<SaveId>(above)].below.push_back(id);
        return;
    }
    const auto node = static_cast<NodeId>(above);
    if (index_.tree()[node].has(kRoot)) {
        index_.begin_growth(block.context);
    } else {
        residency_.hold({&node, 1});
    }
}

void ExternalSaves::unlink(SaveId id) {
    Block& block = blocks_[id];
    SaveId* at = &buckets_[bucket_of(block.above, block.token_hash)];
    while (*at != id) at = &blocks_[*at].next_in_bucket;
    *at = block.next_in_bucket;
    block.is_in_bucket = false;
}

// Ends the hold that link() has taken on a node.
void ExternalSaves::let_go(Place above, std::uint32_t context) {
    if ((above & kSaveBit) != 0) return;
    const auto node = static_cast<NodeId>(above);
    if (index_.tree()[node].has(kRoot)) {
        index_.end_growth(context);
    } else {
        residency_.unhold({&node, 1});
    }
}

// Returns true if the block above was not dropped.
bool ExternalSaves::is_current(const Block& block) const {
    if (block.epoch != index_.epoch()) return false;
    if ((block.above & kSaveBit) != 0) return true;
    return !index_.tree()[static_cast<NodeId>(block.above)].has(kDetached);
}

// Drops the block and those below it: they will not be inserted.
void ExternalSaves::lose(SaveId top) {
    if ((blocks_[top].above & kSaveBit) != 0) {
        std::erase(blocks_[static_cast<SaveId>(blocks_[top].above)].below, top);
    }
    std::vector<SaveId> lost = {top};
    for (std::size_t i = 0; i < lost.size(); ++i) {
        const SaveId id = lost[i];
        Block& block = blocks_[id];
        unlink(id);
        let_go(block.above, block.context);
        lost.insert(lost.end(), block.below.begin(), block.below.end());
        for (const LeaseId lease : block.leases) cut(leases_.at(lease), id);
        block.leases.clear();
        block.below.clear();
        groups_.lose(id);
        if (block.items != kNoItems) index_.tree().item_keys().unref(block.items);
        if (block.state == State::kQueued) uses_.end_read({&block.device, 1}, block.reader);
        const bool is_proven = block.state == State::kProven;
        if (is_proven) residency_.free_host({&block.host, 1});
        if (block.state == State::kQueued) block.device = kNoBlock;
        block.state = State::kLost;
        if (is_proven) free(id);
    }
}

// Removes the blocks from this one on from those that are being saved for the lease.
void ExternalSaves::cut(Lease& lease, SaveId id) {
    const auto from = std::find(lease.saving.begin(), lease.saving.end(), id);
    if (from == lease.saving.end()) return;  // a block above it was cut before
    note_changed(lease);
    lease.saving.erase(from, lease.saving.end());
    if (lease.saving.empty() && lease.is(LeaseState::kReleasing)) ended_.push_back(lease.id());
}

void ExternalSaves::free(SaveId id) {
    Block& block = blocks_[id];
    block.state = State::kFree;
    block.device = block.host = kNoBlock;
    free_.push_back(id);
}

// Inserts a proven block behind a node into the tree, and then the proven blocks below it.
void ExternalSaves::insert(SaveId first) {
    std::vector<SaveId> next = {first};
    for (std::size_t i = 0; i < next.size(); ++i) insert_chain(next[i], next);
    index_.change();
}

// Inserts a block together with the proven ones below it, up to one behind which they fork, or
// which other leases wait for. Appends the proven blocks behind these to `next`.
void ExternalSaves::insert_chain(SaveId first, std::vector<SaveId>& next) {
    PrefixTree& tree = index_.tree();
    const Place above = blocks_[first].above;
    const std::uint32_t depth = blocks_[first].depth;
    const std::vector<LeaseId>& leases = blocks_[first].leases;
    auto& [chain, tokens, items, nodes] = chain_;
    chain.clear();
    tokens.clear();
    items.clear();
    nodes.clear();
    for (SaveId id = first;;) {
        const Block& block = blocks_[id];
        unlink(id);
        chain.push_back(id);
        tokens.insert(tokens.end(), block.tokens.begin(), block.tokens.end());
        items.push_back(block.items);
        if (block.below.size() != 1) break;
        const Block& below = blocks_[block.below.front()];
        if (below.state != State::kProven || below.leases != leases) break;
        id = block.below.front();
    }
    const std::size_t known = tree.find_or_add_path(static_cast<NodeId>(above), tokens.data(),
                                                    items, chain.size(), nodes);
    const auto added = std::span(nodes).subspan(known);
    residency_.inherit_class(added);
    // The first proven copy is kept: a block that a fetch has brought meanwhile does not take
    // another.
    for (std::size_t i = 0; i < chain.size(); ++i) {
        const BlockId host = blocks_[chain[i]].host;
        if (!residency_.give_host_copy(nodes[i], host)) residency_.free_host({&host, 1});
        groups_.settle(chain[i], nodes[i]);
    }
    published_ += chain.size();
    for (const LeaseId id : leases) {
        Lease& lease = leases_.at(id);
        note_changed(lease);
        residency_.ref(nodes);
        residency_.note_use(lease, depth, nodes);
        lease.path.insert(lease.path.end(), nodes.begin(), nodes.end());
        const auto saved = lease.saving.begin() + static_cast<std::ptrdiff_t>(chain.size());
        lease.saving.erase(lease.saving.begin(), saved);
        if (advanced_.empty() || advanced_.back() != id) advanced_.push_back(id);
        if (lease.saving.empty() && lease.is(LeaseState::kReleasing)) ended_.push_back(id);
    }
    if (leases.empty()) {
        for (const NodeId node : added) tree[node].uses = 1;
        residency_.enqueue_fetched(added);
    }
    for (const SaveId below : blocks_[chain.back()].below) {
        unlink(below);
        link(below, nodes.back());
        if (blocks_[below].state == State::kProven) next.push_back(below);
    }
    let_go(above, blocks_[first].context);
    for (const SaveId id : chain) {
        Block& block = blocks_[id];
        if (block.items != kNoItems) tree.item_keys().unref(block.items);
        block.leases.clear();
        block.below.clear();
        free(id);
    }
    store_saver_.note_host_copies(nodes);
}

// -- transfers -----------------------------------------------------------------------------------

TransferId ExternalSaves::take() {
    queued_ids_.clear();
    std::vector<SaveId> taken;
    for (; !queue_.empty(); queue_.pop_front()) {
        const SaveId id = queue_.front();
        if (blocks_[id].state == State::kQueued && !is_current(blocks_[id])) lose(id);
        if (blocks_[id].state == State::kLost) {
            free(id);
        } else {
            taken.push_back(id);
        }
    }
    residency_.evict_host_until_free(taken.size());
    const std::size_t room = std::min<std::size_t>(taken.size(), host_.free_blocks());
    for (std::size_t i = room; i < taken.size(); ++i) {  // children are behind their parents
        if (blocks_[taken[i]].state == State::kQueued) lose(taken[i]);
        free(taken[i]);
        ++skipped_;
    }
    taken.resize(room);
    announce_changed();
    if (taken.empty()) return 0;
    InFlight save;
    Transfer& transfer = save.transfer;
    transfer.direction = Direction::kOffload;
    transfer.host_blocks.resize(room);
    host_.take(transfer.host_blocks);
    for (std::size_t i = 0; i < room; ++i) {
        Block& block = blocks_[taken[i]];
        block.state = State::kCopying;
        block.host = transfer.host_blocks[i];
        transfer.device_blocks.push_back(block.device);
        transfer.after_step = std::max(transfer.after_step, device_.after_step(block.device));
    }
    save.blocks = std::move(taken);
    const TransferId id = transfers_.begin_other();
    in_flight_.emplace(id, std::move(save));
    return id;
}

void ExternalSaves::give_up_queue() {
    for (; !queue_.empty(); queue_.pop_front()) {
        const SaveId id = queue_.front();
        if (blocks_[id].state == State::kQueued) lose(id);
        free(id);
    }
    groups_.give_up_queue();
    announce_changed();
}

void ExternalSaves::reset() {
    for (SaveId id = 0; id < blocks_.size(); ++id) {
        const State state = blocks_[id].state;
        if (state != State::kFree && state != State::kLost) lose(id);
    }
    changed_.clear();  // these leases will not publish what they promised
}

void ExternalSaves::purge(const std::vector<bool>& contexts) {
    for (SaveId id = 0; id < blocks_.size(); ++id) {
        const Block& block = blocks_[id];
        const bool is_in_use = block.state != State::kFree && block.state != State::kLost;
        if (is_in_use && contexts[block.context]) lose(id);
    }
    announce_changed();
}

// Ends the uses of the device ids, at once for blocks in a row that one lease has named.
void ExternalSaves::end_reads(const InFlight& save) {
    const std::span<const BlockId> ids = save.transfer.device_blocks;
    for (std::size_t first = 0, end = 0; first < ids.size(); first = end) {
        const LeaseId reader = blocks_[save.blocks[first]].reader;
        while (end < ids.size() && blocks_[save.blocks[end]].reader == reader) ++end;
        uses_.end_read(ids.subspan(first, end - first), reader);
    }
}

void ExternalSaves::complete(TransferId id, std::uint32_t good) {
    const InFlight save = std::move(in_flight_.extract(id).mapped());
    transfers_.end_other();
    end_reads(save);
    std::size_t copied = 0;
    for (std::size_t i = 0; i < save.blocks.size(); ++i) {
        Block& block = blocks_[save.blocks[i]];
        const bool has_arrived = i < good && !block.overwritten;
        copied += has_arrived;
        if (i == good && leases_.is_open(block.reader)) {
            leases_.at(block.reader).save_failed = true;
        }
        if (block.state == State::kLost) {
            residency_.free_host({&block.host, 1});
            free(save.blocks[i]);
            continue;
        }
        block.state = State::kProven;
        if (!has_arrived || !is_current(block)) lose(save.blocks[i]);
    }
    saved_ += copied;
    failed_ += save.blocks.size() - copied;
    for (const SaveId block : save.blocks) {
        const bool is_next = (blocks_[block].above & kSaveBit) == 0;
        if (blocks_[block].state == State::kProven && is_next) insert(block);
    }
    announce_changed();
}

Step ExternalSaves::after_step(LeaseId lease) const {
    Step newest = 0;
    for (const Block& block : blocks_) {
        if (block.reader != lease || block.device == kNoBlock) continue;
        newest = std::max(newest, device_.after_step(block.device));
    }
    return newest;
}

std::vector<LeaseId> ExternalSaves::take_ended() {
    std::vector<LeaseId> ended = std::exchange(ended_, {});
    std::erase_if(ended, [this](LeaseId id) {
        return !leases_.is_open(id) || leases_.at(id).is_in_use() ||
               !leases_.at(id).is(LeaseState::kReleasing);
    });
    return ended;
}

void ExternalSaves::add_to(CoreStatistics& statistics) const {
    statistics.attention.offloaded_blocks += saved_;
    statistics.failed_blocks += failed_;
    statistics.skipped_backups += skipped_;
    statistics.published_blocks += published_;
    for (const Block& block : blocks_) {
        statistics.attention.host.in_flight += block.host != kNoBlock;
    }
}

void ExternalSaves::check(Report& report) const {
    const PrefixTree& tree = index_.tree();
    std::size_t known = 0;
    std::size_t listed = 0;
    for (SaveId id = 0; id < blocks_.size(); ++id) {
        const Block& block = blocks_[id];
        if (block.host != kNoBlock) report.host.own(block.host, "a save");
        if (block.state == State::kFree || block.state == State::kLost) continue;
        ++known;
        listed += block.leases.size();
        report.item_refs += block.items != kNoItems;
        SaveId found = buckets_[bucket_of(block.above, block.token_hash)];
        while (found != kNone && found != id) found = blocks_[found].next_in_bucket;
        report.require(found == id, "I2: saved block ", id,
                       " is not found behind the block above it");
        if ((block.above & kSaveBit) != 0) {
            const Block& above = blocks_[static_cast<SaveId>(block.above)];
            report.require(std::count(above.below.begin(), above.below.end(), id) == 1,
                           "I2: saved block ", id, " is not known to the block above it");
            continue;
        }
        const auto node = static_cast<NodeId>(block.above);
        if (tree[node].has(kRoot)) {
            ++report.growths[block.context];
            continue;
        }
        report.require(tree.is_live(node), "I3: saved block ", id, " continues a freed node");
        ++report.holds[node];
        report.require(block.state != State::kProven || tree[node].has(kDetached),
                       "I4: proven block ", id, " waits for no block");
    }
    const auto found = std::count_if(blocks_.begin(), blocks_.end(),
                                     [](const Block& block) { return block.is_in_bucket; });
    report.require(known == static_cast<std::size_t>(found), "I2: ", known,
                   " blocks are being saved, ", found, " can be found");
    std::size_t named = 0;
    for (const Lease& lease : leases_) {
        named += lease.saving.size();
        Place above = lease.path.empty() || lease.saving.empty() ? 0 : lease.path.back();
        if (lease.path.empty() && !lease.saving.empty()) above = index_.root_of(lease);
        for (const SaveId id : lease.saving) {
            const Block& block = blocks_[id];
            report.require(std::count(block.leases.begin(), block.leases.end(), lease.id()) == 1 &&
                               block.above == above,
                           "I2: saved block ", id, " of a lease does not follow its path");
            above = kSaveBit | id;
        }
    }
    report.require(named == listed, "I5: leases list ", named, " blocks that are being saved of ",
                   listed);
}

}  // namespace aiokv
