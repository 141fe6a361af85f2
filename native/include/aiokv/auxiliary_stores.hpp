// The stores of the block groups besides attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/auxiliary_groups.hpp"
#include "aiokv/auxiliary_store.hpp"
#include "aiokv/core_types.hpp"
#include "aiokv/matching.hpp"

namespace aiokv {

class AuxiliaryStores {
  public:
    // `groups`: connected to the stores; without stores, there is nothing to save or fetch.
    AuxiliaryStores(AuxiliaryGroups& groups, const Matching& matching);

    // -- saves
    bool wants_saves() const;
    TransferId take();  // 0: there is nothing to save

    // -- fetches for a hit of the first `blocks` blocks of a prompt, which are cached
    // Returns a flag per block from `first` to `end` of the prompt: 1 if a tier has the group's
    // copy. All these blocks must be cached.
    std::vector<std::uint8_t> has_copies(Lease& lease, GroupId group, std::size_t first,
                                         std::size_t end) const;
    // Begins to fetch the copies of one group that the hit lacks, or returns the fetch in flight
    // that brings the first of them. Returns 0 if no copy is missing, if the blocks are not cached,
    // or if the host has no room.
    TransferId begin_fetch(Lease& lease, GroupId group, std::size_t blocks);

    // -- both
    bool has(TransferId id) const { return find(id) != nullptr; }
    GroupId group_of(TransferId id) const { return find(id)->group(); }
    const StoreTransfer& get(TransferId id) const { return find(id)->get(id); }
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                  std::span<const std::uint8_t> results);

  private:
    AuxiliaryStore* find(TransferId id) const;
    AuxiliaryStore* of_group(GroupId group) const;

    AuxiliaryGroups& groups_;
    const Matching& matching_;
    std::vector<AuxiliaryStore*> stores_;
};

}  // namespace aiokv
