// The free ids of the host tier, given out in long runs of consecutive ids.
//
// A bitmap, and above its words a binary tree. Each node of the tree has the length of the longest
// run of free ids below it. Freeing an id or finding a run takes O(log capacity); the tree takes 24
// bytes per 64 ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/block_pool.hpp"

namespace aiokv {

class RunPool {
  public:
    explicit RunPool(std::uint32_t capacity);

    std::uint32_t capacity() const { return capacity_; }
    std::uint32_t free_blocks() const { return free_; }
    bool is_free(BlockId id) const {
        const auto index = static_cast<std::uint32_t>(id);
        return (words_[index / 64] >> (index % 64)) & 1;
    }
    std::size_t bytes() const;

    // Takes ids in as few runs of consecutive ids as a greedy choice finds: the lowest run that has
    // enough ids, else the longest run (the lowest of equals) and then the same for the rest.
    // Requires out.size() <= free_blocks().
    void take(std::span<BlockId> out);

    void free_all() { *this = RunPool(capacity_); }
    // Throws InternalError, changing nothing, when the id is free already or not of this pool.
    void give_back(BlockId id);

  private:
    // Lengths of runs of free ids below a node of the tree: the run at its start, the run at its
    // end, and the longest.
    struct Runs {
        std::uint32_t first = 0;
        std::uint32_t last = 0;
        std::uint32_t longest = 0;

        bool operator==(const Runs&) const = default;
    };

    static Runs runs_of(std::uint64_t word);
    static Runs join(const Runs& a, const Runs& b, std::uint32_t half);
    std::uint32_t longest() const { return tree_[1].longest; }
    std::uint32_t find(std::uint32_t length) const;
    void take_range(std::uint32_t start, std::uint32_t length, BlockId* out);
    void update(std::size_t word);

    std::uint32_t capacity_;
    std::uint32_t free_;
    std::size_t leaves_;                // a power of two; the first leaves stand for words_
    std::vector<std::uint64_t> words_;  // bit = 1: free
    std::vector<Runs> tree_;            // the root is 1; the children of i are 2i and 2i + 1
};

}  // namespace aiokv
