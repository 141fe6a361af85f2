#include "aiokv/auxiliary_store.hpp"

#include <algorithm>
#include <utility>

#include "aiokv/residency.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

// Saves pin copies of a small pool, so only a part of the pool may be in saves.
SaveLimits limits_of(const GroupPool& host) {
    return {std::clamp<std::size_t>(host.capacity() / 8, 1, 64), 2};
}

}  // namespace

// -- copies in host memory -------------------------------------------------------------------

bool HostIds::renew(BlockId id, std::uint8_t flags) {
    is_renewed_ = true;
    return (std::exchange(flags_[at(id)], flags) & kSaveQueued) != 0;
}

// Keeps an eighth of the host ids, and at least one, free or saved ahead of eviction.
std::vector<BlockId> HostIds::next_evicted() {
    is_renewed_ = false;
    std::vector<BlockId> ids;
    std::uint32_t ready = pool_.free_ids();
    const std::uint32_t target = std::max<std::uint32_t>(pool_.capacity() / 8, 1);
    for (BlockId id = pool_.first_evicted(); id != kNoBlock && ready < target;
         id = pool_.evicted_after(id), ++ready) {
        ids.push_back(id);
    }
    return ids;
}

void HostIds::begin_save(std::span<const BlockId> ids) {
    for (const BlockId id : ids) {
        set(id, kSaving);
        pool_.add_reader(id);
    }
}

void HostIds::finish_save(std::span<const BlockId> ids) {
    for (const BlockId id : ids) {
        clear(id, kSaving);
        pool_.remove_copier(id);
    }
}

// -- saves -----------------------------------------------------------------------------------

AuxiliaryStore::AuxiliaryStore(const CoreConfig& config, Index& index, StoredBlocks& stored,
                               Residency& residency, TransferLedger& transfers, GroupPool& device,
                               GroupPool& host, GroupId group)
    : index_(index),
      stored_(stored),
      residency_(residency),
      transfers_(transfers),
      device_(device),
      host_(host),
      group_(group),
      saves_(config, index.tree(), stored, transfers, HostIds(host), limits_of(host)) {
    host_.note_uses();
}

void AuxiliaryStore::renew(BlockId id, std::uint8_t flags) {
    if (saves_.copies().renew(id, flags)) saves_.note_dropped();
}

void AuxiliaryStore::note_copy(BlockId id) {
    renew(id, 0);
    saves_.queue(id);
}

void AuxiliaryStore::note_use(NodeId node) {
    const BlockId id = host_.find(node);
    if (id != kNoBlock) saves_.note_use(id);
}

// -- fetches ---------------------------------------------------------------------------------

TransferId AuxiliaryStore::begin_fetch(std::span<const NodeId> nodes) {
    Fetch fetch;
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
        fetch.host_blocks.push_back(kNoBlock);
        evicted_ += host_.take(fetch.host_blocks.back());
    }
    index_.change();  // the call above may have evicted copies
    residency_.hold(fetch.nodes);
    const TransferId id = transfers_.begin_other();
    for (const NodeId node : fetch.nodes) coming_.emplace(node, id);
    fetches_.emplace(id, std::move(fetch));
    return id;
}

// The first proven copy is kept: a node that has a host copy by now does not take another.
void AuxiliaryStore::finish_fetch(TransferId id, Outcome outcome, std::uint32_t first_bad) {
    const Fetch fetch = std::move(fetches_.extract(id).mapped());
    const std::size_t good = proven(outcome, first_bad, fetch.nodes.size());
    fetched_ += good;
    unfetched_ += fetch.nodes.size() - good;
    PrefixTree& tree = index_.tree();
    for (std::size_t i = 0; i < fetch.nodes.size(); ++i) {
        const NodeId node = fetch.nodes[i];
        coming_.erase(node);
        if (i >= good || tree[node].has(kDetached) || host_.find(node) != kNoBlock) {
            host_.give_back(fetch.host_blocks[i], 0);
            continue;
        }
        renew(fetch.host_blocks[i], kStored);
        host_.attach(node, fetch.host_blocks[i]);
        tree[node].set(kHasSides);
        index_.change();
    }
    residency_.unhold(fetch.nodes);
    transfers_.end_other();
}

// -- both ------------------------------------------------------------------------------------

void AuxiliaryStore::complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                              std::span<const std::uint8_t> results) {
    if (saves_.has(id)) return saves_.complete(id, outcome, results);
    finish_fetch(id, outcome, first_bad);
}

void AuxiliaryStore::add_to(GroupStatistics& statistics) const {
    const SaveCounts& saves = saves_.counts();
    statistics.host.evicted_by_cause["capacity"] += evicted_;
    statistics.saved_blocks = saves.saved;
    statistics.unsaved_by_cause["unsaved"] = saves.dropped + saves.refused + saves.failed;
    statistics.fetched_blocks = fetched_;
    statistics.unfetched_blocks = unfetched_;
}

void AuxiliaryStore::check(Report& report, Ownership& ids,
                           std::vector<std::uint32_t>& readers) const {
    saves_.for_each_read([&readers](BlockId id) { ++readers[static_cast<std::size_t>(id)]; });
    saves_.check(report);
    std::size_t coming = 0;
    for (const auto& [id, fetch] : fetches_) {
        coming += fetch.nodes.size();
        for (const BlockId host : fetch.host_blocks) ids.own(host, "a fetch");
        for (const NodeId node : fetch.nodes) {
            ++report.holds[node];
            const auto found = coming_.find(node);
            report.require(found != coming_.end() && found->second == id, "I3: fetch ", id,
                           " cannot be joined by a node");
            report.require(index_.tree().is_live(node), "I3: fetch ", id, " holds a freed node");
        }
    }
    report.require(coming == coming_.size(), "I3: fetches bring ", coming, " copies, ",
                   coming_.size(), " can be joined");
}

}  // namespace aiokv
