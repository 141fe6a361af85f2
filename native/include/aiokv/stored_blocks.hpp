// Digests of indexed blocks, and which of them the stores have.
//
// A side table by node, only for caches with stores. A digest is computed from that of the parent
// when it is first needed. An entry is valid while its node has the flag kHasStoreEntry. A new node
// does not have the flag, so nothing has to be undone when a node is freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/index.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

enum StoreFlag : std::uint8_t {
    kStored = 1 << 0,       // a store has the block, or had it
    kSaveQueued = 1 << 1,   // waits for a save
    kSaving = 1 << 2,       // a save reads its host copy
    kSaveRefused = 1 << 3,  // the last save was refused or failed; tried again after its next use
    kFetched = 1 << 4,      // a fetch brought it, and no lease has hit it since then
};

class StoredBlocks {
  public:
    StoredBlocks(const CoreConfig& config, Index& index);

    // False if no block has a digest or a flag: without stores, or if recurrent state or windows
    // are not copied to host memory. Such blocks cannot be hit without their state or windows, and
    // what is not in host memory cannot be stored.
    bool exist() const { return exist_; }

    const Digest& digest(NodeId node);
    // Sets a digest that was computed before the node was added.
    void set_digest(NodeId node, const Digest& digest) {
        set(node, kDigestKnown);
        digests_[node] = digest;
    }
    // Returns the digest of a block behind `parent`.
    Digest digest_below(const Digest& parent, Tokens tokens, ItemKey items) const;

    bool has(NodeId node, std::uint8_t flags) const {
        return tree_[node].has(kHasStoreEntry) && (flags_[node] & flags) != 0;
    }
    void set(NodeId node, std::uint8_t flags) {
        open(node);
        flags_[node] = static_cast<std::uint8_t>(flags_[node] | flags);
    }
    void clear(NodeId node, std::uint8_t flags) {
        if (!tree_[node].has(kHasStoreEntry)) return;
        flags_[node] = static_cast<std::uint8_t>(flags_[node] & ~flags);
    }

    // Returns true if the policy wants the block saved once it is on the host, and no store has it.
    bool is_due(NodeId node) const {
        return !has(node, kStored | kSaving) && config_.stores.saves_after(tree_[node].uses);
    }
    // Returns true if the host block is due for a save that has not begun.
    bool awaits_save(NodeId node) const {
        if (!exist_) return false;
        return config_.stores.policy == SavePolicy::kWriteBack ? !has(node, kStored | kSaveRefused)
                                                               : has(node, kSaveQueued);
    }

    std::size_t bytes() const { return digests_.bytes() + flags_.bytes(); }

  private:
    static constexpr std::uint8_t kDigestKnown = 1 << 7;

    void open(NodeId node);

    const CoreConfig& config_;
    const bool exist_;
    Index& index_;
    PrefixTree& tree_;
    Slab<Digest> digests_;
    Slab<std::uint8_t> flags_;
    std::vector<NodeId> unknown_;  // scratch of digest()
};

}  // namespace aiokv
