// Leases on device blocks that a server owns: refs without blocks, onloads, saves, and idle leases.
#include <numeric>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Ids = std::vector<BlockId>;
using Prompt = std::vector<std::int32_t>;

struct Cache {
    Core core;

    explicit Cache(bool stores = false) : core(config(stores)) {}
    ~Cache() {
        for (const std::string& violation : core.violations()) CHECK_EQ(violation, "");
    }

    static CoreConfig config(bool stores) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = 16;
        config.host_blocks = 16;
        config.stores.exist = stores;
        config.write_policy = SavePolicy::kWriteThrough;
        config.external_device = true;
        return config;
    }
    LeaseId begin(const Prompt& tokens, const Ids& ids, std::int64_t computed = 0) {
        const LeaseId lease = core.match(tokens, "").lease;
        CHECK(core.allocate(lease, static_cast<std::int64_t>(tokens.size())) == Grant::kReady);
        core.assign(lease, ids, computed, {});
        return lease;
    }
    std::uint32_t hit(const Prompt& tokens) const { return core.would_hit(tokens, "").host_blocks; }
    void done(TransferId id) { core.complete(id, Outcome::kDone, 0); }
};

Prompt prompt(std::size_t tokens) {
    Prompt named(tokens);
    std::iota(named.begin(), named.end(), 0);
    return named;
}

}  // namespace

TEST(a_grant_takes_refs_and_no_block) {
    Cache cache;
    const LeaseId first = cache.begin(prompt(7), {0, 1, 2, 3});
    CHECK_EQ(cache.core.commit(first, 6, 0), 3u);
    cache.done(cache.core.take_backups());
    CHECK_EQ(cache.hit(prompt(7)), 3u);
    CHECK(cache.core.release(first, 0));
    CHECK_EQ(cache.core.evict_host(1), 1u);
    const LeaseId second = cache.core.match(prompt(7), "").lease;
    CHECK(cache.core.allocate(second, 7) == Grant::kReady);
    CHECK_EQ(cache.core.lease(second).table.size(), 0u);
    CHECK_EQ(cache.core.evict_host(9), 0u);
    CHECK(cache.core.release(second, 0));
    CHECK_EQ(cache.core.evict_host(9), 2u);
}

TEST(a_released_lease_ends_with_its_last_save) {
    Cache cache;
    const LeaseId lease = cache.begin(prompt(7), {0, 1, 2, 3});
    cache.core.commit(lease, 2, 0);
    const TransferId first = cache.core.take_backups();
    cache.core.commit(lease, 6, 0);
    const TransferId second = cache.core.take_backups();
    CHECK(!cache.core.release(lease, 0));
    CHECK(cache.core.complete(second, Outcome::kDone, 0).empty());
    CHECK_EQ(cache.hit(prompt(7)), 0u);
    CHECK(!cache.core.is_idle(lease));
    const std::vector<LeaseId> ended = cache.core.complete(first, Outcome::kDone, 0);
    CHECK(ended == std::vector<LeaseId>{lease});
    CHECK(cache.core.is_idle(lease));
    CHECK(cache.core.settle().idle == std::vector<LeaseId>{lease});
    CHECK_EQ(cache.hit(prompt(7)), 3u);
}

TEST(a_lost_parent_takes_the_blocks_below_it_along) {
    Cache cache;
    const LeaseId lease = cache.begin(prompt(7), {0, 1, 2, 3});
    cache.core.commit(lease, 2, 0);
    const TransferId first = cache.core.take_backups();
    cache.core.commit(lease, 4, 0);
    const TransferId second = cache.core.take_backups();
    cache.core.commit(lease, 6, 0);  // queued
    cache.done(second);
    cache.core.complete(first, Outcome::kFailed, 0);
    CHECK_EQ(cache.hit(prompt(7)), 0u);
    CHECK(cache.core.is_idle(lease));
    CHECK_EQ(cache.core.take_backups(), 0u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 16u);
    cache.core.release(lease, 0);
}

TEST(host_blocks_of_an_onload_survive_a_reset) {
    Cache cache;
    LeaseId lease = cache.begin(prompt(7), {0, 1, 2, 3});
    cache.core.commit(lease, 6, 0);
    cache.done(cache.core.take_backups());
    cache.core.release(lease, 0);
    lease = cache.begin(prompt(7), {4, 5, 6, 7});
    const TransferId onload = cache.core.lease(lease).onloads.at(0);
    cache.core.reset();
    CHECK_EQ(cache.core.statistics().attention.host.free, 13u);
    CHECK(cache.core.violations().empty());
    cache.done(onload);
    CHECK_EQ(cache.core.statistics().attention.host.free, 16u);
    cache.core.release(lease, 0);
}

TEST(a_queued_block_is_lost_with_the_block_above_it) {
    Cache cache;
    const LeaseId writer = cache.begin(prompt(7), {0, 1, 2, 3});
    cache.core.commit(writer, 4, 0);
    cache.done(cache.core.take_backups());
    const LeaseId reader = cache.begin(prompt(5), {4, 5, 6});
    cache.core.commit(writer, 6, 0);  // queued below the second block
    cache.core.complete(cache.core.lease(reader).onloads.at(0), Outcome::kFailed, 1);
    CHECK_EQ(cache.core.take_backups(), 0u);
    CHECK(cache.core.is_idle(writer));
    CHECK_EQ(cache.core.commit(writer, 6, 0), 2u);  // and what was dropped
    cache.done(cache.core.take_backups());
    CHECK_EQ(cache.hit(prompt(7)), 3u);
    cache.core.release(reader, 0);
    cache.core.release(writer, 0);
}

TEST(a_block_that_a_fetch_has_brought_first_keeps_its_copy) {
    Cache cache(true);
    const LeaseId writer = cache.begin(prompt(7), {0, 1, 2, 3});
    cache.core.commit(writer, 6, 0);
    const TransferId save = cache.core.take_backups();
    const LeaseId reader = cache.core.match(prompt(7), "").lease;
    CHECK_EQ(cache.core.missing(reader).digests.size(), 3u);
    cache.done(cache.core.begin_fetch(reader, 2));
    CHECK_EQ(cache.hit(prompt(7)), 2u);
    cache.done(save);
    CHECK_EQ(cache.hit(prompt(7)), 3u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 13u);
    cache.core.release(reader, 0);
    cache.core.release(writer, 0);
}

TEST(a_chain_of_proven_blocks_enters_the_tree_as_one_run) {
    Cache cache;
    const Prompt tokens = prompt(11);
    const LeaseId first = cache.begin(tokens, {0, 1, 2, 3, 4, 5});
    cache.core.commit(first, 2, 0);
    const TransferId top = cache.core.take_backups();
    cache.core.commit(first, 10, 0);
    Prompt other = tokens;
    other[8] = 99;  // shares four blocks
    const LeaseId second = cache.begin(other, {6, 7, 8, 9, 10, 11});
    cache.core.commit(second, 10, 0);
    cache.done(cache.core.take_backups());
    CHECK_EQ(cache.hit(tokens), 0u);
    CHECK(cache.core.violations().empty());
    cache.done(top);
    CHECK(cache.core.violations().empty());
    CHECK_EQ(cache.hit(tokens), 5u);
    CHECK_EQ(cache.hit(other), 5u);
    for (const LeaseId lease : {first, second}) {
        CHECK_EQ(cache.core.lease(lease).path.size(), 5u);
        CHECK(cache.core.lease(lease).saving.empty());
    }
    CHECK(cache.core.lease(first).path[3] == cache.core.lease(second).path[3]);
    CHECK(cache.core.settle().advanced == (std::vector<LeaseId>{first, second, first, second}));
    cache.core.release(first, 0);
    cache.core.release(second, 0);
    CHECK_EQ(cache.core.evict_host(9), 6u);
}

TEST(calls_that_need_a_device_pool_throw) {
    Cache cache;
    const LeaseId lease = cache.begin(prompt(7), {0, 1, 2, 3});
    const std::vector<LeaseId> leases = {lease};
    CHECK_THROWS(UsageError, cache.core.extend(leases, 1));
    CHECK_THROWS(UsageError, cache.core.fork(lease, 0));
    CHECK_THROWS(UsageError, cache.core.swap_out(lease, 0));
    CHECK_THROWS(UsageError, cache.core.resize_device(4));
    cache.core.release(lease, 0);
}
