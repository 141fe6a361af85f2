#include "aiokv/auxiliary_store.hpp"

#include <algorithm>
#include <utility>

#include "aiokv/error.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/store_saver.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

constexpr std::uint64_t kRememberedOffers = 4096;
constexpr std::size_t kMaxCopies = 64;  // of a save

}  // namespace

AuxiliaryStore::AuxiliaryStore(const CoreConfig& config, Index& index, StoredBlocks& stored,
                               Residency& residency, TransferLedger& transfers, GroupPool& device,
                               GroupPool& host, GroupId group)
    : config_(config),
      index_(index),
      stored_(stored),
      residency_(residency),
      ledger_(transfers),
      device_(device),
      host_(host),
      group_(group),
      max_copies_(std::clamp<std::size_t>(host.capacity() / 8, 1, kMaxCopies)),
      flags_(host.capacity(), 0) {
    host_.note_uses();
    if (config.stores.only_reused) {
        offered_.emplace(kRememberedOffers + 2 * std::uint64_t{host.capacity()});
    }
}

// -- saves -----------------------------------------------------------------------------------

// The id has another copy from now on; the last one was evicted or dropped.
void AuxiliaryStore::reset_flags(BlockId id, std::uint8_t flags) {
    counts_.unsaved += has_flag(id, kIsQueued);
    flags_[static_cast<std::size_t>(id)] = flags;
}

void AuxiliaryStore::note_copy(BlockId id) {
    reset_flags(id, 0);
    looks_ahead_ = saves_ahead();
    queue(id);
}

void AuxiliaryStore::note_use(NodeId node) {
    const BlockId id = host_.find(node);
    if (id == kNoBlock) return;
    clear(id, kIsRefused);
    queue(id);
}

void AuxiliaryStore::queue(BlockId id) {
    if (saves_ahead() || has_flag(id, kIsStored | kIsQueued | kIsSaving)) return;
    const Node& n = index_.tree()[host_.node_of(id)];
    if (config_.stores.policy == StorePolicy::kAtNthUse && n.uses < config_.stores.uses) return;
    if (queue_.size() >= config_.stores.queue_blocks) {
        ++counts_.unsaved;
        return;
    }
    set(id, kIsQueued);
    queue_.push_back(id);
}

bool AuxiliaryStore::can_save(BlockId id) const {
    return host_.is_attached(id) && !has_flag(id, kIsStored | kIsSaving | kIsRefused);
}

// Offered once: a copy that is rejected is offered again after its next use.
bool AuxiliaryStore::admit(BlockId id) {
    if (!offered_ || offered_->offer(stored_.digest(host_.node_of(id)))) return true;
    set(id, kIsRefused);
    ++counts_.unsaved;
    return false;
}

std::vector<BlockId> AuxiliaryStore::take_queued() {
    std::vector<BlockId> ids;
    while (!queue_.empty() && ids.size() < max_copies_) {
        const BlockId id = queue_.front();
        queue_.pop_front();
        if (!has_flag(id, kIsQueued)) continue;
        clear(id, kIsQueued);
        if (can_save(id) && admit(id)) ids.push_back(id);
    }
    return ids;
}

// An eighth of the host ids is kept free or saved ahead of eviction, and at least one.
std::vector<BlockId> AuxiliaryStore::look_ahead() {
    looks_ahead_ = false;
    std::vector<BlockId> ids;
    std::uint32_t ready = host_.free_ids();
    const std::uint32_t target = std::max<std::uint32_t>(host_.capacity() / 8, 1);
    for (BlockId id = host_.first_evicted(); id != kNoBlock && ready < target;
         id = host_.evicted_after(id), ++ready) {
        if (can_save(id) && admit(id) && ids.size() < max_copies_) ids.push_back(id);
    }
    return ids;
}

bool AuxiliaryStore::wants_saves() const {
    return saves_ < kMaxInFlight && (saves_ahead() ? looks_ahead_ : !queue_.empty());
}

TransferId AuxiliaryStore::take() {
    if (!wants_saves()) return 0;
    AuxiliaryTransfer save;
    save.is_save = true;
    save.ids = saves_ahead() ? look_ahead() : take_queued();
    if (save.ids.empty()) return 0;
    for (const BlockId id : save.ids) {
        save.nodes.push_back(host_.node_of(id));
        save.digests.push_back(stored_.digest(save.nodes.back()));
        set(id, kIsSaving);
        host_.add_reader(id);
    }
    const TransferId transfer = ledger_.begin_store_transfer();
    transfers_.emplace(transfer, std::move(save));
    ++saves_;
    return transfer;
}

void AuxiliaryStore::finish_save(const AuxiliaryTransfer& save, Outcome outcome,
                                 std::span<const std::uint8_t> results) {
    --saves_;
    for (std::size_t i = 0; i < save.ids.size(); ++i) {
        const bool is_done = results.empty()
                                 ? outcome == Outcome::kDone
                                 : static_cast<SaveResult>(results[i]) == SaveResult::kDone;
        clear(save.ids[i], kIsSaving);
        set(save.ids[i], is_done ? kIsStored : kIsRefused);
        (is_done ? counts_.saved : counts_.unsaved) += 1;
        host_.remove_copier(save.ids[i]);
    }
}

// -- fetches ---------------------------------------------------------------------------------

TransferId AuxiliaryStore::begin_fetch(std::span<const NodeId> nodes) {
    AuxiliaryTransfer fetch;
    for (const NodeId node : nodes) {
        if (const BlockId id = host_.find(node); id != kNoBlock) host_.touch(id);
        if (has_copy(node)) continue;
        if (const auto found = coming_.find(node); found != coming_.end()) {
            if (fetch.nodes.empty()) return found->second;
            continue;
        }
        fetch.nodes.push_back(node);
    }
    if (fetch.nodes.empty() || fetch.nodes.size() > host_.room()) return 0;
    for (const NodeId node : fetch.nodes) {
        fetch.digests.push_back(stored_.digest(node));
        fetch.ids.push_back(kNoBlock);
        counts_.evicted += host_.take(fetch.ids.back());
    }
    index_.change();  // copies may have been evicted
    residency_.hold(fetch.nodes);
    const TransferId transfer = ledger_.begin_store_transfer();
    for (const NodeId node : fetch.nodes) coming_.emplace(node, transfer);
    transfers_.emplace(transfer, std::move(fetch));
    return transfer;
}

// First proof wins: a node that has a host copy by now keeps it.
void AuxiliaryStore::finish_fetch(const AuxiliaryTransfer& fetch, std::uint32_t good) {
    PrefixTree& tree = index_.tree();
    for (std::size_t i = 0; i < fetch.nodes.size(); ++i) {
        const NodeId node = fetch.nodes[i];
        const bool is_good = i < good;
        (is_good ? counts_.fetched : counts_.unfetched) += 1;
        coming_.erase(node);
        if (!is_good || tree[node].has(kDetached) || host_.find(node) != kNoBlock) {
            host_.give_back(fetch.ids[i], 0);
            continue;
        }
        reset_flags(fetch.ids[i], kIsStored);
        host_.attach(node, fetch.ids[i]);
        tree[node].set(kHasSides);
        looks_ahead_ = saves_ahead();
        index_.change();
    }
    residency_.unhold(fetch.nodes);
}

// -- both ------------------------------------------------------------------------------------

void AuxiliaryStore::complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                              std::span<const std::uint8_t> results) {
    const std::size_t copies = transfers_.at(id).ids.size();
    if (!results.empty() && results.size() != copies) {
        throw UsageError("complete: the report of a save of " + str(copies) + " copies has " +
                         str(results.size()) + " results");
    }
    const AuxiliaryTransfer transfer = std::move(transfers_.extract(id).mapped());
    if (transfer.is_save) {
        finish_save(transfer, outcome, results);
    } else {
        finish_fetch(transfer, outcome == Outcome::kDone     ? static_cast<std::uint32_t>(copies)
                               : outcome == Outcome::kFailed ? first_bad
                                                             : 0);
    }
    ledger_.end_store_transfer();
}

void AuxiliaryStore::add_to(GroupStatistics& statistics) const {
    statistics.evicted_host += counts_.evicted;
    statistics.stored = counts_.saved;
    statistics.unstored = counts_.unsaved;
    statistics.fetched = counts_.fetched;
    statistics.unfetched = counts_.unfetched;
}

std::vector<BlockId> AuxiliaryStore::ids_of(bool saves) const {
    std::vector<BlockId> ids;
    for (const auto& [id, transfer] : transfers_) {
        if (transfer.is_save != saves) continue;
        ids.insert(ids.end(), transfer.ids.begin(), transfer.ids.end());
    }
    return ids;
}

void AuxiliaryStore::check(Report& report) const {
    std::size_t coming = 0;
    for (const auto& [id, transfer] : transfers_) {
        if (transfer.is_save) {
            for (const BlockId saved : transfer.ids) {
                report.require(has_flag(saved, kIsSaving), "I3: save ", id, " reads host id ",
                               saved, ", which counts as idle");
            }
            continue;
        }
        coming += transfer.nodes.size();
        for (const NodeId node : transfer.nodes) {
            ++report.holds[node];
            const auto found = coming_.find(node);
            report.require(found != coming_.end() && found->second == id, "I3: fetch ", id,
                           " cannot be joined by a node");
            report.require(index_.tree().is_live(node), "I3: fetch ", id, " holds a freed node");
        }
    }
    report.require(coming == coming_.size(), "I3: fetches bring ", coming, " copies, ",
                   coming_.size(), " can be joined");
    const auto saving = std::count_if(flags_.begin(), flags_.end(),
                                      [](std::uint8_t flags) { return flags & kIsSaving; });
    report.require(static_cast<std::size_t>(saving) == ids_of(true).size(), "I3: ", saving,
                   " host ids count as being saved, saves read ", ids_of(true).size());
}

}  // namespace aiokv
