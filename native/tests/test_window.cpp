// Sliding-window groups, with and without an attention sink (sliding_windows.cpp).
#include <numeric>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

Prompt counting(std::size_t length, std::int32_t first = 0) {
    Prompt tokens(length);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

// A core of 2-token blocks with one group.
class Cache {
  public:
    explicit Cache(const WindowConfig& window, std::uint32_t host_blocks = 0)
        : core(config(window, host_blocks)) {}
    ~Cache() { check(); }

    LeaseId granted(const Prompt& tokens) {
        const LeaseId id = core.match(tokens, "").lease;
        CHECK(core.allocate(id, static_cast<std::int64_t>(tokens.size())) == Grant::kReady);
        check();
        return id;
    }
    void commit(LeaseId id, std::int64_t first, std::int64_t end, Step step = 0) {
        for (; first <= end; first += 2) {
            core.commit(id, first, step);
            check();
        }
    }
    // One character per block: '#' where it has an id of the group.
    std::string table(LeaseId id) const {
        std::string shown;
        for (const BlockId block : core.table_of(id, 0)) shown += block == kNoBlock ? '.' : '#';
        return shown;
    }
    std::uint32_t hit(const Prompt& tokens) {
        const LeaseId id = core.match(tokens, "").lease;
        const std::uint32_t blocks = core.lease(id).device_hit;
        core.release(id, 0);
        return blocks;
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;

  private:
    static CoreConfig config(const WindowConfig& window, std::uint32_t host_blocks) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = 64;
        config.host_blocks = host_blocks;
        if (window.host_blocks > 0) config.write_policy = SavePolicy::kWriteThrough;
        config.windows = {window};
        return config;
    }
};

}  // namespace

TEST(blocks_behind_the_window_are_freed) {
    Cache cache({6, 5, 2, 0});
    const LeaseId id = cache.granted(counting(20));
    CHECK_EQ(cache.table(id), "####......");
    cache.commit(id, 2, 12);
    CHECK_EQ(cache.table(id), "....####..");
    cache.core.release(id, 0);
}

TEST(the_sink_is_kept_and_reserved) {
    Cache cache({12, 5, 2, 3});
    const LeaseId id = cache.granted(counting(20));
    CHECK_EQ(cache.core.window_group(0).reserved, 6u);
    const std::vector<BlockId> before = cache.core.table_of(id, 0);
    cache.commit(id, 2, 12);
    CHECK_EQ(cache.table(id), "##..####..");
    CHECK_EQ(cache.core.table_of(id, 0)[0], before[0]);
    CHECK_EQ(cache.core.table_of(id, 0)[1], before[1]);
    const LeaseId other = cache.granted(counting(20, 100));
    CHECK_EQ(cache.core.window_group(0).reserved, 12u);
    const LeaseId third = cache.core.match(counting(2, 200), "").lease;
    CHECK(cache.core.allocate(third, 2) == Grant::kNone);
    cache.core.release(id, 0);
    CHECK_EQ(cache.core.window_group(0).reserved, 6u);
    CHECK(cache.core.allocate(third, 2) == Grant::kReady);
    cache.core.release(other, 0);
    cache.core.release(third, 0);
    CHECK_EQ(cache.core.window_group(0).reserved, 0u);
}

TEST(a_hit_holds_the_sink_and_the_window) {
    Cache cache({12, 3, 2, 2});
    LeaseId id = cache.granted(counting(17));
    cache.commit(id, 2, 16);
    cache.core.release(id, 0);
    id = cache.granted(counting(17));
    CHECK_EQ(cache.core.lease(id).cached_tokens, 16u);
    CHECK_EQ(cache.table(id), "#......##");
    const GroupPool& pool = cache.core.window_group(0).pool;
    CHECK_EQ(pool.readers(cache.core.table_of(id, 0)[0]), 1u);
    CHECK_EQ(pool.readers(cache.core.table_of(id, 0)[7]), 1u);
    cache.core.release(id, 0);
    CHECK_EQ(pool.idle(), pool.attached());
}

TEST(a_freed_sink_keeps_its_step) {
    Cache cache({6, 5, 2, 1});
    const LeaseId id = cache.granted(counting(20));
    cache.commit(id, 2, 12, 7);
    const BlockId sink = cache.core.table_of(id, 0)[0];
    CHECK(cache.core.window_group(0).pool.is_attached(sink));
    cache.core.release(id, 8);
    CHECK_EQ(cache.core.window_group(0).pool.after_step(sink), 8u);
    cache.core.finish_step(8);
    CHECK_EQ(cache.core.window_group(0).pool.after_step(sink), 0u);
}

TEST(a_match_refreshes_the_sink_as_well_as_the_window) {
    Cache cache({8, 3, 0, 2});
    for (const std::int32_t first : {0, 100}) {
        const LeaseId id = cache.granted(counting(7, first));
        cache.core.commit(id, 7, 0);
        cache.core.release(id, 0);
    }
    CHECK_EQ(cache.core.window_group(0).pool.idle(), 6u);
    CHECK_EQ(cache.hit(counting(7)), 3u);
    const LeaseId other = cache.granted(counting(11, 200));  // evicts four, all of the second
    CHECK_EQ(cache.hit(counting(7, 100)), 0u);
    CHECK_EQ(cache.hit(counting(7)), 3u);
    cache.core.release(other, 0);
}

TEST(the_sink_of_a_swapped_lease_keeps_its_step) {
    Cache cache({6, 5, 2, 1}, 16);
    const LeaseId id = cache.granted(counting(20));
    cache.commit(id, 2, 12, 7);
    const std::vector<BlockId> table = cache.core.table_of(id, 0);
    CHECK(cache.core.swap_out(id, 9));
    cache.core.complete(cache.core.lease(id).swap_transfer, Outcome::kDone, 0);
    cache.check();
    const GroupPool& pool = cache.core.window_group(0).pool;
    for (const std::size_t index : {0, 5}) CHECK_EQ(pool.after_step(table[index]), 9u);
    CHECK(cache.core.table_of(id, 0) == table);
    cache.core.release(id, 0);
}

TEST(windows_that_do_not_fit_are_refused) {
    CHECK_THROWS(ConfigError, Cache({3, 4, 2, 0}));
    CHECK_THROWS(ConfigError, Cache({6, 4, 2, 5}));
    CHECK_THROWS(ConfigError, Cache({6, 4, 2, ~0u}));
    CHECK_THROWS(ConfigError, Cache({6, 0, 2, 0}));
    CHECK_EQ(Cache({7, 4, 2, 5}).core.window_group(0).reach_blocks, 7u);
}

// -- host copies ---------------------------------------------------------------------------------

namespace {

// Copies all blocks to host memory that can be copied now.
std::size_t save_all(Cache& cache, Outcome outcome = Outcome::kDone) {
    std::size_t blocks = 0;
    while (const TransferId id = cache.core.take_group_save()) {
        blocks += cache.core.move(id).sources.size();
        cache.check();
        cache.core.complete(id, outcome, 0);
        cache.check();
    }
    return blocks;
}

void serve(Cache& cache, const Prompt& tokens) {
    const LeaseId id = cache.granted(tokens);
    cache.commit(id, 2, static_cast<std::int64_t>(tokens.size()));
    cache.core.release(id, 0);
}

// A lease whose window of 2 blocks is in host memory only.
LeaseId hit_on_host(Cache& cache) {
    serve(cache, counting(8));
    save_all(cache);
    serve(cache, counting(12, 100));
    const LeaseId id = cache.core.match(counting(9), "").lease;
    CHECK(cache.core.allocate(id, 12) == Grant::kLoading);
    cache.check();
    return id;
}

}  // namespace

TEST(a_window_returns_from_the_host_and_is_cached_again) {
    Cache cache({6, 5, 2, 0, 8}, 16);
    const LeaseId id = hit_on_host(cache);
    const TransferId onload = cache.core.lease(id).onloads[0];
    CHECK_EQ(cache.core.move(onload).targets.size(), std::size_t{2});
    cache.core.complete(onload, Outcome::kDone, 0);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 8u);
    const BlockId block = cache.core.table_of(id, 0)[3];
    CHECK(cache.core.window_group(0).pool.is_attached(block));
    cache.core.release(id, 0);
    CHECK_EQ(cache.hit(counting(9)), 4u);
}

TEST(a_table_does_not_move_on_while_its_window_is_onloaded) {
    Cache cache({6, 5, 2, 0, 8}, 16);
    const LeaseId id = hit_on_host(cache);
    CHECK_EQ(cache.table(id), "..####");
    cache.core.commit(id, 12, 0);
    cache.check();
    CHECK_EQ(cache.table(id), "..####");
    cache.core.complete(cache.core.lease(id).onloads[0], Outcome::kDone, 0);
    cache.check();
    CHECK_EQ(cache.table(id), "....##");
    cache.core.release(id, 0);
}

TEST(a_failed_onload_of_a_window_drops_its_host_copies_from_the_first_bad_one_on) {
    Cache cache({6, 5, 2, 0, 8}, 16);
    const LeaseId id = hit_on_host(cache);
    const GroupPool& host = *cache.core.window_group(0).host_pool();
    const std::uint32_t cached = host.attached();
    cache.core.complete(cache.core.lease(id).onloads[0], Outcome::kFailed, 1);
    cache.check();
    CHECK_EQ(host.attached(), cached - 1);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 0u);
    cache.core.release(id, 0);
    CHECK_EQ(cache.hit(counting(9)), 3u);
}

TEST(ids_that_only_a_move_needs_are_set_aside) {
    Cache cache({5, 5, 2, 0, 8}, 16);  // a lease needs 4
    const LeaseId id = hit_on_host(cache);
    const TransferId onload = cache.core.lease(id).onloads[0];
    cache.core.release(id, 0);
    cache.check();
    CHECK_EQ(cache.core.window_group(0).in_flight, 2u);
    const LeaseId other = cache.core.match(counting(20, 200), "").lease;
    CHECK(!cache.core.can_allocate(other, 20, false));
    CHECK(cache.core.allocate(other, 20) == Grant::kNone);
    cache.core.complete(onload, Outcome::kDone, 0);
    CHECK_EQ(cache.core.window_group(0).in_flight, 0u);
    CHECK(cache.core.allocate(other, 20) == Grant::kReady);
    cache.core.release(other, 0);
}
