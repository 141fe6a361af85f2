// The free ids of one tier: a bitmap with a summary level, lowest id first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace aiokv {

using BlockId = std::int32_t;
constexpr BlockId kNoBlock = -1;

class BlockPool {
  public:
    explicit BlockPool(std::uint32_t capacity);

    std::uint32_t capacity() const { return capacity_; }
    std::uint32_t free_blocks() const { return free_; }
    bool is_free(BlockId id) const {
        const auto index = static_cast<std::uint32_t>(id);
        return (words_[index / 64] >> (index % 64)) & 1;
    }
    std::size_t bytes() const;

    // The lowest free ids, ascending. Requires out.size() <= free_blocks().
    void take_lowest(std::span<BlockId> out);

    // A range of free ids that begins with the lowest free one and has at most `count` ids.
    // Requires a free id.
    struct Extent {
        BlockId first;
        std::uint32_t count;
    };
    Extent take_extent(std::uint32_t count);

    // Throw InternalError, changing nothing, when an id is free already or not of this pool.
    void give_back(Extent extent);
    void give_back(BlockId id) {
        if (static_cast<std::uint32_t>(id) >= capacity_ || is_free(id)) refuse(id);
        set_free(static_cast<std::uint32_t>(id));
    }

    // Frees all ids except these.
    void free_all_but(std::span<const BlockId> used);

    // Throws UsageError, changing nothing, when an id >= capacity is in use.
    void resize(std::uint32_t capacity);

  private:
    [[noreturn]] void refuse(BlockId id) const;
    void set_free(std::uint32_t id) {
        words_[id / 64] |= std::uint64_t{1} << (id % 64);
        summary_[id / 4096] |= std::uint64_t{1} << (id / 64 % 64);
        first_summary_ = std::min<std::size_t>(first_summary_, id / 4096);
        ++free_;
    }
    void set_used(std::uint32_t id);

    std::uint32_t capacity_ = 0;
    std::uint32_t free_ = 0;
    std::vector<std::uint64_t> words_;    // bit = 1: free
    std::vector<std::uint64_t> summary_;  // bit = 1: the word has a free id
    std::size_t first_summary_ = 0;       // index of the first summary word that may have a bit
};

}  // namespace aiokv
