// The prefix index: the tree of blocks, one root per context, and the items of prompts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/prefix_tree.hpp"

namespace aiokv {

class Index {
  public:
    Index(const CoreConfig& config, const LeaseTable& leases);

    // The nodes. Each field of a node or run is written by the component that owns it: shape and
    // token ids by PrefixTree; copies, refs, holds, pins and queue links by Residency; uses and the
    // flags of backups by Saver.
    PrefixTree& tree() { return tree_; }
    const PrefixTree& tree() const { return tree_; }

    // -- contexts: prompts of different contexts share no block
    // Returns the context of this key, opened if there was none, and counts one more lease in it.
    std::uint32_t enter_context(std::string_view key);
    void enter_context(std::uint32_t context) { ++contexts_[context].leases; }
    void leave_context(std::uint32_t context);
    // Returns the context of this key, or nothing if there is none.
    std::optional<std::uint32_t> find_context(std::string_view key) const;
    // Returns the share of a salt, counted from 1; 0 if it has none.
    std::uint32_t share_of_salt(std::string_view salt) const;
    // Call when a transfer that will insert blocks into the context begins, and when it has ended.
    void begin_growth(std::uint32_t context) { ++contexts_[context].growths; }
    void end_growth(std::uint32_t context) {
        --contexts_[context].growths;
        close_if_unused(context);
    }
    // Closes the context of a root without children, unless it has leases or growths.
    void close_context_if_unused(NodeId root) {
        close_if_unused(static_cast<std::uint32_t>(tree_[root].device));
    }
    void close_unused_contexts();
    // Frees all blocks at once, except those of these detached runs. Nothing may use the others,
    // and they must be in no queue.
    void clear_all_but(std::span<const RunId> kept);
    std::string_view context_of_root(NodeId root) const {
        return contexts_[static_cast<std::size_t>(tree_[root].device)].key;
    }
    // Returns which contexts have a salt, by their numbers.
    std::vector<bool> contexts_of(std::string_view salt) const;
    NodeId root_of(std::size_t context) const { return contexts_[context].root; }
    std::size_t num_contexts() const { return context_ids_.size(); }
    // Visits the roots of contexts. Looks at no more than `max_contexts` entries of the table.
    template <class Visit>
    void for_some_roots(std::size_t max_contexts, Visit visit) const {
        for (std::size_t i = 0; i < std::min(max_contexts, contexts_.size()); ++i) {
            if (contexts_[i].root != kNone) visit(contexts_[i].root);
        }
    }
    NodeId root_of(const Lease& lease) const { return contexts_[lease.context].root; }
    // Seed for the fingerprints of the lease's prompt. It is the same in every process.
    std::uint64_t seed_of(const Lease& lease) const { return contexts_[lease.context].seed; }

    // -- multimodal items of a lease's prompt
    // Adds items behind those that the lease has. No block that they touch may be indexed.
    void add_items(Lease& lease, std::span<const Item> items);
    // Looks up the items of a lease that has none. Takes no refs, because the lease only searches
    // its prompt.
    void find_items(Lease& lease, std::span<const Item> items) const;
    void copy_items(const Lease& from, Lease& to);
    void forget_items(Lease& lease);
    // Removes the items from position `num_tokens` on, because the lease drops these positions.
    // `num_tokens` must not be inside an item.
    void cut_items(Lease& lease, std::uint32_t num_tokens);

    // Returns the digest of the first `num_tokens` positions of a lease, all of which have tokens.
    Digest prompt_digest(const Lease& lease, std::uint32_t num_tokens) const;

    // -- the blocks of a lease
    // Returns true if the index has exactly this block, so that another lease could share it.
    bool is_indexed(const Lease& lease, std::size_t block) const {
        return block < lease.path.size() && tree_[lease.path[block]].has(kDeviceValid);
    }
    // Returns true if only the lease has the device id.
    bool is_private(const Lease& lease, std::size_t block) const {
        return block >= lease.path.size() || tree_[lease.path[block]].device != lease.table[block];
    }
    // Visits the leases that have blocks.
    template <class Visit>
    void for_each_holder(Visit visit) const {
        for (const Lease& lease : leases_) {
            if (lease.has_blocks()) visit(lease);
        }
    }
    // Returns the number of blocks of the path before the first dropped one.
    std::size_t attached_blocks(const Lease& lease) const;

    // -- versions
    // Changes whenever an earlier walk of the tree may have become wrong.
    std::uint64_t version() const { return version_; }
    void change() { ++version_; }
    // Changes with each reset. Blocks computed by a lease of an older epoch are not indexed.
    std::uint64_t epoch() const { return epoch_; }
    bool is_of_epoch(const Lease& lease) const { return lease.epoch == epoch_; }
    void begin_epoch() {
        ++epoch_;
        ++version_;
    }

    std::vector<BlockView> blocks() const;  // matchable blocks, in no order
    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    struct Context {
        std::string key;
        NodeId root = kNone;
        std::uint32_t leases = 0;
        std::uint32_t growths = 0;
        std::uint64_t seed = 0;
    };

    std::uint32_t open_context(std::string_view key);
    void close_if_unused(std::uint32_t context);
    void close_forgotten_contexts();

    const CoreConfig& config_;
    const LeaseTable& leases_;
    PrefixTree tree_;
    std::deque<Context> contexts_;
    std::vector<std::uint32_t> free_contexts_;
    std::unordered_map<std::string, std::uint32_t> context_ids_;
    std::uint64_t version_ = 1;
    std::uint64_t epoch_ = 1;
};

}  // namespace aiokv
