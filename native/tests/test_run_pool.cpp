// The host pool against a set of ids that is searched from end to end.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "aiokv/error.hpp"
#include "aiokv/run_pool.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

std::vector<BlockId> take(RunPool& pool, std::size_t count) {
    std::vector<BlockId> ids(count);
    pool.take(ids);
    return ids;
}

std::vector<BlockId> range(BlockId first, BlockId last) {
    std::vector<BlockId> ids(static_cast<std::size_t>(last - first));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

// What RunPool is, without its tree: the lowest run that holds all, else the longest.
class NaivePool {
  public:
    explicit NaivePool(std::size_t capacity) : free(capacity, true) {}

    std::vector<BlockId> take(std::size_t count) {
        std::vector<BlockId> ids;
        while (ids.size() < count) {
            const auto [start, length] = best(count - ids.size());
            for (std::size_t id = start; id < start + length; ++id) {
                free[id] = false;
                ids.push_back(static_cast<BlockId>(id));
            }
        }
        return ids;
    }

    std::vector<bool> free;

  private:
    std::pair<std::size_t, std::size_t> best(std::size_t wanted) const {
        std::pair<std::size_t, std::size_t> longest{0, 0};
        std::size_t start = 0;
        for (std::size_t id = 0; id <= free.size(); ++id) {
            if (id < free.size() && free[id]) continue;
            const std::size_t length = id - start;
            if (length >= wanted) return {start, wanted};
            if (length > longest.second) longest = {start, length};
            start = id + 1;
        }
        return longest;
    }
};

}  // namespace

TEST(longest_runs_are_taken_first_when_no_run_holds_all) {
    RunPool pool(300);
    CHECK(take(pool, 300) == range(0, 300));
    for (BlockId id = 10; id < 14; ++id) pool.give_back(id);
    for (BlockId id = 60; id < 200; ++id) pool.give_back(id);
    for (BlockId id = 250; id < 256; ++id) pool.give_back(id);
    CHECK(take(pool, 0).empty());
    CHECK(take(pool, 3) == range(10, 13));
    CHECK(take(pool, 136) == range(60, 196));
    std::vector<BlockId> rest = range(250, 256);
    for (BlockId id = 196; id < 200; ++id) rest.push_back(id);
    rest.push_back(13);
    CHECK(take(pool, 11) == rest);
    CHECK_EQ(pool.free_blocks(), 0u);
}

TEST(pool_refuses_ids_that_are_free_or_not_its_own) {
    RunPool pool(100);
    take(pool, 50);
    pool.give_back(3);
    for (const BlockId id : {3, 70, 100, 127, -1, 1 << 30}) {
        CHECK_THROWS(InternalError, (pool.give_back(id), 0));
    }
    CHECK_EQ(pool.free_blocks(), 51u);
    RunPool none(0);
    CHECK_THROWS(InternalError, (none.give_back(0), 0));
}

// Sizes around those of words and of the tree's levels.
TEST(pool_equals_a_naive_pool) {
    std::mt19937 random(1);
    for (const std::size_t capacity :
         {1u, 2u, 63u, 64u, 65u, 127u, 128u, 129u, 700u, 4096u, 5000u}) {
        RunPool pool(static_cast<std::uint32_t>(capacity));
        NaivePool naive(capacity);
        std::vector<BlockId> used;
        for (int step = 0; step < 400; ++step) {
            const std::size_t room = pool.free_blocks();
            if (random() % 2 == 0) {
                const std::size_t most = random() % 8 == 0 ? room : std::min<std::size_t>(room, 40);
                const auto ids = take(pool, random() % (most + 1));
                CHECK(ids == naive.take(ids.size()));
                used.insert(used.end(), ids.begin(), ids.end());
            } else if (!used.empty()) {
                // A stretch of neighbours, or ids from anywhere.
                if (random() % 2 == 0) std::shuffle(used.begin(), used.end(), random);
                for (std::size_t n = random() % (used.size() + 1); n > 0; --n) {
                    pool.give_back(used.back());
                    naive.free[static_cast<std::size_t>(used.back())] = true;
                    used.pop_back();
                }
            }
            CHECK_EQ(pool.free_blocks() + used.size(), capacity);
        }
        for (std::size_t id = 0; id < capacity; ++id) {
            CHECK_EQ(pool.is_free(static_cast<BlockId>(id)), naive.free[id]);
        }
    }
}
