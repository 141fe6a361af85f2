// Saves of the host copies of one block group to the stores.
//
//   host copy -> queued -> being saved -> stored, or refused until its next use
//
// The store policy says when a copy is queued; before eviction, a save looks at those that are
// evicted next instead. No request waits for a save: copies beyond the bound of the queue, and
// copies that are evicted first, are not saved.
//
// `Copies` gives access to the copies of the group by key; their flags are StoreFlags:
//   is_live, is_indexed, exists   the key is in use; belongs to the index; can be read in host
//   memory node_of, host_id              the node and the host id of the key has, set, clear flags
//   wants_look_ahead, next_evicted   of copies to save before they are evicted
//   begin_save, finish_save       set and clear kSaving; keep the copies meanwhile (I3)
//   for_each                      visits all live keys
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/error.hpp"
#include "aiokv/stored_blocks.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

// A save, or a fetch.
struct StoreTransfer {
    std::vector<BlockId> host_blocks;  // host ids of the group
    std::vector<Digest> digests;
    std::vector<std::uint8_t> follows;  // of a save: 1 if the block before it here is its parent
};

// Result of one block of a save, as the worker reports it.
enum class SaveResult : std::uint8_t { kDone, kMissing, kWrong, kRefused, kFailed };

// Numbers of copies since the cache was created.
struct SaveCounts {
    std::uint64_t saved = 0;
    std::uint64_t dropped = 0;  // because the queue was full
    std::uint64_t refused = 0;
    std::uint64_t failed = 0;
};

struct SaveLimits {
    std::size_t copies = 1;  // most copies per save
    std::size_t saves = 1;   // most saves in flight
};

template <class Copies>
class SaveQueue {
  public:
    using Key = typename Copies::Key;

    SaveQueue(const CoreConfig& config, const PrefixTree& tree, StoredBlocks& stored,
              TransferLedger& transfers, Copies copies, const SaveLimits& limits)
        : config_(config.stores),
          tree_(tree),
          stored_(stored),
          transfers_(transfers),
          copies_(std::move(copies)),
          limits_(limits) {}

    Copies& copies() { return copies_; }
    const Copies& copies() const { return copies_; }
    bool saves_ahead() const { return config_.policy == SavePolicy::kWriteBack; }

    // Queues a copy that has arrived in host memory or was used.
    void queue(Key key) {
        if (!copies_.exists(key) || copies_.has(key, kStored | kSaving | kSaveQueued)) return;
        if (!config_.saves_after(tree_[copies_.node_of(key)].uses)) return;
        if (queue_.size() >= config_.queue_blocks) {
            ++counts_.dropped;
            return;
        }
        copies_.set(key, kSaveQueued);
        queue_.push_back(key);
    }
    // Call when a lease uses the copy. A refused copy is then tried again.
    void note_use(Key key) {
        copies_.clear(key, kSaveRefused);
        queue(key);
    }
    // Call when a queued copy was evicted.
    void note_dropped() { ++counts_.dropped; }
    void forget_queue() { queue_.clear(); }

    // Returns true if take() may find copies to save. Constant time.
    bool wants_saves() const {
        if (saves_.size() >= limits_.saves) return false;
        return saves_ahead() ? copies_.wants_look_ahead() : !queue_.empty();
    }
    // Begins a save of copies that are due. Returns 0 if there are none, or enough saves in flight.
    TransferId take() {
        if (!wants_saves()) return 0;
        Save save;
        save.keys = saves_ahead() ? look_ahead() : take_queued();
        if (save.keys.empty()) return 0;
        NodeId before = kNone;
        for (const Key key : save.keys) {
            const NodeId node = copies_.node_of(key);
            save.host_blocks.push_back(copies_.host_id(key));
            save.digests.push_back(stored_.digest(node));
            save.follows.push_back(before != kNone && tree_.parent(node) == before);
            before = node;
        }
        copies_.begin_save(save.keys);
        const TransferId id = transfers_.begin_other();
        saves_.emplace(id, std::move(save));
        return id;
    }
    bool has(TransferId id) const { return saves_.contains(id); }
    const StoreTransfer& get(TransferId id) const { return saves_.at(id); }
    // Ends a save. `results`: one per copy; if empty, all copies have the result of `outcome`.
    // Throws UsageError, changing nothing, for another number of results.
    void complete(TransferId id, Outcome outcome, std::span<const std::uint8_t> results) {
        const std::size_t copies = saves_.at(id).keys.size();
        if (!results.empty() && results.size() != copies) {
            throw UsageError("complete: the report of a save of " + std::to_string(copies) +
                             " blocks has " + std::to_string(results.size()) + " results");
        }
        const Save save = std::move(saves_.extract(id).mapped());
        const SaveResult all = outcome == Outcome::kDone ? SaveResult::kDone : SaveResult::kFailed;
        for (std::size_t i = 0; i < copies; ++i) {
            const auto result = results.empty() ? all : static_cast<SaveResult>(results[i]);
            const bool is_done = result == SaveResult::kDone;
            copies_.set(save.keys[i], is_done ? kStored : kSaveRefused);
            counts_.saved += is_done;
            counts_.refused += result == SaveResult::kRefused;
            counts_.failed += !is_done && result != SaveResult::kRefused;
        }
        copies_.finish_save(save.keys);
        transfers_.end_other();
    }

    const SaveCounts& counts() const { return counts_; }

    // Visits the saves in flight. Returns their number.
    template <class Visit>
    void for_each_read(Visit visit) const {
        for (const auto& [id, save] : saves_)
            std::for_each(save.keys.begin(), save.keys.end(), visit);
    }
    template <class Findings>
    void check(Findings& report) const {
        std::size_t reads = 0;
        for (const auto& [id, save] : saves_) {
            reads += save.keys.size();
            for (std::size_t i = 0; i < save.keys.size(); ++i) {
                const Key key = save.keys[i];
                report.require(copies_.is_live(key) && copies_.host_id(key) == save.host_blocks[i],
                               "I3: save ", id, " block ", i, " changed under way");
                report.require(copies_.has(key, kSaving), "I3: save ", id, " block ", i,
                               " is not known to be read");
            }
        }
        std::size_t saving = 0;
        std::size_t queued = 0;
        copies_.for_each([&](Key key) {
            saving += copies_.has(key, kSaving);
            queued += copies_.has(key, kSaveQueued) && copies_.is_indexed(key);
        });
        report.require(saving == reads, "I3: saves read ", reads, " blocks, ", saving,
                       " are known to be read");
        report.require(queued <= queue_.size() && queue_.size() <= config_.queue_blocks,
                       "I6: ", queued, " blocks wait for a save, ", queue_.size(), " are queued");
    }

  private:
    struct Save : StoreTransfer {
        std::vector<Key> keys;
    };

    bool can_save(Key key) const {
        return copies_.exists(key) && !copies_.has(key, kStored | kSaving | kSaveRefused);
    }
    std::vector<Key> take_queued() {
        std::vector<Key> keys;
        while (!queue_.empty() && keys.size() < limits_.copies) {
            const Key key = queue_.front();
            queue_.pop_front();
            if (!copies_.is_live(key) || !copies_.has(key, kSaveQueued)) continue;
            copies_.clear(key, kSaveQueued);
            if (can_save(key)) keys.push_back(key);
        }
        return keys;
    }
    std::vector<Key> look_ahead() {
        std::vector<Key> keys = copies_.next_evicted();
        std::erase_if(keys, [this](Key key) { return !can_save(key); });
        if (keys.size() > limits_.copies) keys.resize(limits_.copies);
        return keys;
    }

    const StoreConfig& config_;
    const PrefixTree& tree_;
    StoredBlocks& stored_;
    TransferLedger& transfers_;
    Copies copies_;
    SaveLimits limits_;
    std::deque<Key> queue_;                       // keys; those without kSaveQueued are stale
    std::unordered_map<TransferId, Save> saves_;  // in flight
    SaveCounts counts_;
};

}  // namespace aiokv
