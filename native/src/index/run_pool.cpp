#include "aiokv/run_pool.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

constexpr std::uint32_t kWordIds = 64;

// Returns a word whose bit i is set if bits i to i + length - 1 of `word` are set.
std::uint64_t starts_of_runs(std::uint64_t word, std::uint32_t length) {
    for (std::uint32_t have = 1; have < length;) {
        const std::uint32_t step = std::min(have, length - have);
        word &= word >> step;
        have += step;
    }
    return word;
}

std::uint32_t longest_run(std::uint64_t word) {
    std::uint32_t length = 0;
    for (; word != 0; word &= word >> 1) ++length;
    return length;
}

}  // namespace

RunPool::RunPool(std::uint32_t capacity)
    : capacity_(capacity),
      free_(capacity),
      leaves_(std::bit_ceil(std::max<std::size_t>(1, (std::size_t{capacity} + 63) / kWordIds))),
      words_((std::size_t{capacity} + 63) / kWordIds, ~std::uint64_t{0}),
      tree_(2 * leaves_) {
    if (capacity % kWordIds != 0) words_.back() = (std::uint64_t{1} << (capacity % kWordIds)) - 1;
    for (std::size_t i = 0; i < words_.size(); ++i) tree_[leaves_ + i] = runs_of(words_[i]);
    std::uint32_t half = kWordIds;
    for (std::size_t level = leaves_ / 2; level > 0; level /= 2, half *= 2) {
        for (std::size_t i = level; i < 2 * level; ++i) {
            tree_[i] = join(tree_[2 * i], tree_[2 * i + 1], half);
        }
    }
}

std::size_t RunPool::bytes() const {
    return words_.capacity() * sizeof(std::uint64_t) + tree_.capacity() * sizeof(Runs);
}

RunPool::Runs RunPool::runs_of(std::uint64_t word) {
    return {static_cast<std::uint32_t>(std::countr_one(word)),
            static_cast<std::uint32_t>(std::countl_one(word)), longest_run(word)};
}

// Returns the runs of two neighbouring halves, with `half` ids each, together.
RunPool::Runs RunPool::join(const Runs& a, const Runs& b, std::uint32_t half) {
    return {a.first == half ? half + b.first : a.first, b.last == half ? half + a.last : b.last,
            std::max({a.longest, b.longest, a.last + b.first})};
}

// Call after a word has changed. Updates the nodes above it, up to the first one that does not
// change.
void RunPool::update(std::size_t word) {
    std::size_t node = leaves_ + word;
    Runs runs = runs_of(words_[word]);
    for (std::uint32_t half = kWordIds; tree_[node] != runs; half *= 2) {
        tree_[node] = runs;
        node /= 2;
        if (node == 0) return;
        runs = join(tree_[2 * node], tree_[2 * node + 1], half);
    }
}

// Returns the lowest id at which `length` free ids begin. Requires that there is one.
std::uint32_t RunPool::find(std::uint32_t length) const {
    std::size_t node = 1;
    std::size_t width = leaves_ * kWordIds;
    std::size_t start = 0;
    while (node < leaves_) {
        node *= 2;
        width /= 2;
        if (tree_[node].longest >= length) continue;
        start += width;
        if (tree_[node].last + tree_[node + 1].first >= length) {
            return static_cast<std::uint32_t>(start) - tree_[node].last;
        }
        ++node;
    }
    const std::uint64_t starts = starts_of_runs(words_[start / kWordIds], length);
    return static_cast<std::uint32_t>(start) + static_cast<std::uint32_t>(std::countr_zero(starts));
}

void RunPool::take_range(std::uint32_t start, std::uint32_t length, BlockId* out) {
    for (std::uint32_t i = 0; i < length; ++i) out[i] = static_cast<BlockId>(start + i);
    free_ -= length;
    for (const std::uint32_t stop = start + length; start < stop;) {
        const std::uint32_t bit = start % kWordIds;
        const std::uint32_t count = std::min(kWordIds - bit, stop - start);
        const std::uint64_t ones = ~std::uint64_t{0} >> (kWordIds - count);
        words_[start / kWordIds] &= ~(ones << bit);
        update(start / kWordIds);
        start += count;
    }
}

void RunPool::take(std::span<BlockId> out) {
    while (!out.empty()) {
        const auto wanted = static_cast<std::uint32_t>(out.size());
        const std::uint32_t length = std::min(wanted, longest());
        take_range(find(length), length, out.data());
        out = out.subspan(length);
    }
}

void RunPool::give_back(BlockId id) {
    const auto index = static_cast<std::uint32_t>(id);
    if (index >= capacity_) {
        throw InternalError("host block " + std::to_string(id) + " given back to a pool of " +
                            std::to_string(capacity_));
    }
    if (is_free(id)) throw InternalError("host block " + std::to_string(id) + " given back twice");
    words_[index / kWordIds] |= std::uint64_t{1} << (index % kWordIds);
    ++free_;
    update(index / kWordIds);
}

}  // namespace aiokv
