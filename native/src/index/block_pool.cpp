#include "aiokv/block_pool.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {

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
            out[taken++] = static_cast<BlockId>(index * 64 + std::countr_zero(word));
            word &= word - 1;
        }
        if (word == 0) group &= group - 1;
    }
    free_ -= static_cast<std::uint32_t>(out.size());
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
    for (std::uint32_t id = old; id < capacity; ++id) set_free(id);
    first_summary_ = 0;
}

}  // namespace aiokv
