#include "aiokv/block_pool.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

// Returns a mask of the lowest `bits` bits. Requires bits > 0.
std::uint64_t mask_of(std::uint32_t bits) {
    return ~std::uint64_t{0} >> (64 - bits);
}

// Calls visit(word, mask) for each word of the range with the bits of that word.
template <class Visit>
void for_each_word(BlockPool::Extent extent, Visit visit) {
    auto id = static_cast<std::uint32_t>(extent.first);
    while (extent.count > 0) {
        const std::uint32_t bits = std::min(64 - id % 64, extent.count);
        visit(std::size_t{id / 64}, mask_of(bits) << (id % 64));
        id += bits;
        extent.count -= bits;
    }
}

}  // namespace

BlockPool::BlockPool(std::uint32_t capacity) {
    resize(capacity);
}

std::size_t BlockPool::bytes() const {
    return (words_.capacity() + summary_.capacity()) * sizeof(std::uint64_t);
}

void BlockPool::set_used(std::uint32_t id) {
    std::uint64_t& word = words_[id / 64];
    word &= ~(std::uint64_t{1} << (id % 64));
    if (word == 0) summary_[id / 4096] &= ~(std::uint64_t{1} << (id / 64 % 64));
    --free_;
}

void BlockPool::take_lowest(std::span<BlockId> out) {
    std::size_t taken = 0;
    while (taken < out.size()) {
        while (summary_[first_summary_] == 0) ++first_summary_;
        std::uint64_t& group = summary_[first_summary_];
        const std::size_t index =
            first_summary_ * 64 + static_cast<std::size_t>(std::countr_zero(group));
        std::uint64_t& word = words_[index];
        while (word != 0 && taken < out.size()) {
            const auto bit = static_cast<std::uint32_t>(std::countr_zero(word));
            const auto ones = static_cast<std::uint32_t>(std::countr_one(word >> bit));
            const auto run = std::min(ones, static_cast<std::uint32_t>(out.size() - taken));
            const auto ids = out.subspan(taken, run);
            std::iota(ids.begin(), ids.end(), static_cast<BlockId>(index * 64 + bit));
            word &= ~(mask_of(run) << bit);
            taken += run;
        }
        if (word == 0) group &= group - 1;
    }
    free_ -= static_cast<std::uint32_t>(out.size());
}

BlockPool::Extent BlockPool::take_extent(std::uint32_t count) {
    BlockId first = 0;
    take_lowest({&first, 1});
    const auto begin = static_cast<std::uint32_t>(first);
    std::uint32_t end = begin + 1;
    while (end - begin < count && end < capacity_) {
        const std::uint32_t room = std::min(64 - end % 64, begin + count - end);
        const auto run = std::min<std::uint32_t>(
            room, static_cast<std::uint32_t>(std::countr_one(words_[end / 64] >> (end % 64))));
        if (run == 0) break;
        words_[end / 64] &= ~(mask_of(run) << (end % 64));
        if (words_[end / 64] == 0) summary_[end / 4096] &= ~(std::uint64_t{1} << (end / 64 % 64));
        free_ -= run;
        end += run;
        if (run < room) break;
    }
    return {first, end - begin};
}

void BlockPool::give_back(Extent extent) {
    const auto first = static_cast<std::uint32_t>(extent.first);
    if (first > capacity_ || extent.count > capacity_ - first) {
        refuse(static_cast<BlockId>(std::max(first, capacity_)));
    }
    for_each_word(extent, [&](std::size_t word, std::uint64_t mask) {
        if ((words_[word] & mask) != 0) {
            refuse(static_cast<BlockId>(word * 64 + std::countr_zero(words_[word] & mask)));
        }
    });
    for_each_word(extent, [&](std::size_t word, std::uint64_t mask) {
        words_[word] |= mask;
        summary_[word / 64] |= std::uint64_t{1} << (word % 64);
        first_summary_ = std::min(first_summary_, word / 64);
    });
    free_ += extent.count;
}

void BlockPool::free_all_but(std::span<const BlockId> used) {
    const std::uint32_t capacity = capacity_;
    *this = BlockPool(capacity);
    for (const BlockId id : used) set_used(static_cast<std::uint32_t>(id));
}

void BlockPool::refuse(BlockId id) const {
    if (static_cast<std::uint32_t>(id) < capacity_) {
        throw InternalError("block " + std::to_string(id) + " given back twice");
    }
    throw InternalError("block " + std::to_string(id) + " given back to a pool of " +
                        std::to_string(capacity_));
}

void BlockPool::resize(std::uint32_t capacity) {
    for (std::uint32_t id = capacity; id < capacity_; ++id) {
        if (!is_free(static_cast<BlockId>(id))) {
            throw UsageError("cannot shrink a pool of " + std::to_string(capacity_) +
                             " blocks to " + std::to_string(capacity) + ": block " +
                             std::to_string(id) + " is in use");
        }
    }
    for (std::uint32_t id = capacity; id < capacity_; ++id) set_used(id);
    words_.resize((capacity + 63) / 64, 0);
    summary_.resize((capacity + 4095) / 4096, 0);
    const std::uint32_t old = std::min(capacity_, capacity);
    capacity_ = capacity;
    first_summary_ = std::min<std::size_t>(first_summary_, old / 4096);
    if (capacity > old) give_back({static_cast<BlockId>(old), capacity - old});
}

}  // namespace aiokv
