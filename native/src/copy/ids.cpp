#include "aiokv/ids.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "aiokv/error.hpp"

namespace aiokv {
namespace {

using Ids = std::span<const std::int32_t>;

std::string named(const IdPool& pool, std::int64_t id) {
    return std::string(pool.block_name) + " " + std::to_string(id);
}

// The loops over ids have no branch per id, so that the compiler vectorizes them.
void check_range(Ids ids, const IdPool& pool, std::int32_t lowest) {
    std::int32_t least = ids.front(), greatest = ids.front();
    for (const std::int32_t id : ids) {
        least = std::min(least, id);
        greatest = std::max(greatest, id);
    }
    if (least >= lowest && greatest < pool.num_blocks) return;
    const auto wrong = std::ranges::find_if(
        ids, [&](std::int32_t id) { return id < lowest || id >= pool.num_blocks; });
    throw UsageError(named(pool, *wrong) + " at index " + std::to_string(wrong - ids.begin()) +
                     " is not in [" + std::to_string(lowest) + ", " +
                     std::to_string(pool.num_blocks) + ")");
}

bool ascend(Ids ids) {
    bool falls = false;
    for (std::size_t i = 1; i < ids.size(); ++i) falls |= ids[i - 1] >= ids[i];
    return !falls;
}

}  // namespace

void check_ids(const CopyIds& ids, const IdPool& source, const IdPool& target) {
    if (ids.sources.size() != ids.targets.size()) {
        throw UsageError(
            "the lists of ids are not equally long: " + std::to_string(ids.sources.size()) +
            " source ids, " + std::to_string(ids.targets.size()) + " target ids");
    }
    if (ids.targets.empty()) throw UsageError("the copy has no blocks");
    check_range(ids.sources, source, ids.zeros ? kZeros : 0);
    check_range(ids.targets, target, 0);
    std::vector<std::int32_t> sorted;
    Ids written = ids.targets;
    // The ids of a long prompt usually ascend: to sort them takes ten times as long as to see that.
    if (!ascend(written)) {
        sorted.assign(written.begin(), written.end());
        std::ranges::sort(sorted);
        written = sorted;
        const auto twice = std::ranges::adjacent_find(written);
        if (twice != written.end()) {
            throw UsageError("duplicate destination: " + named(target, *twice));
        }
    }
    if (!ids.same_pool) return;
    for (const std::int32_t id : ids.sources) {
        if (std::binary_search(written.begin(), written.end(), id)) {
            throw UsageError(named(target, id) + " is both a source and a destination");
        }
    }
}

}  // namespace aiokv
