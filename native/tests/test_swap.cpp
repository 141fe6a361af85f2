// Preemption with swap, and forks (core_swap.cpp); I1-I6 after every step.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

// A core of 2-token blocks without a write policy.
class Cache {
  public:
    Cache(std::uint32_t device_blocks, std::uint32_t host_blocks)
        : core(config(device_blocks, host_blocks)) {}
    ~Cache() { check(); }

    LeaseId computed(const Prompt& tokens, bool writes = true) {
        const LeaseId id = core.match(tokens, "", true, writes).lease;
        const auto length = static_cast<std::int64_t>(tokens.size());
        CHECK(core.allocate(id, length) == Grant::kReady);
        core.commit(id, length, 0);
        check();
        return id;
    }
    bool swap_out(LeaseId id, Step step = 0) {
        const bool begun = core.swap_out(id, step);
        check();
        return begun;
    }
    void complete(TransferId id, Outcome outcome = Outcome::kDone, std::uint32_t first_bad = 0) {
        core.complete(id, outcome, first_bad);
        check();
    }
    LeaseId swapped(const Prompt& tokens) {
        const LeaseId id = computed(tokens);
        CHECK(swap_out(id));
        complete(core.lease(id).swap_transfer);
        CHECK(core.lease(id).is(LeaseState::kSwapped));
        return id;
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;

  private:
    static CoreConfig config(std::uint32_t device_blocks, std::uint32_t host_blocks) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = device_blocks;
        config.host_blocks = host_blocks;
        return config;
    }
};

const Prompt kPrompt{1, 2, 3, 4, 5};  // two full blocks and a partial one

}  // namespace

TEST(a_swap_moves_the_tail_behind_the_path) {
    Cache cache(4, 4);
    const LeaseId id = cache.computed(kPrompt);
    const std::vector<BlockId> table = cache.core.lease(id).table;
    CHECK(cache.swap_out(id));
    const Transfer& out = cache.core.transfer(cache.core.lease(id).swap_transfer);
    CHECK(out.device_blocks == table);
    CHECK_EQ(out.nodes.size(), 2u);
    CHECK_EQ(cache.core.statistics().attention.host.in_flight, 3u);
    CHECK_THROWS(LeaseError, cache.core.commit(id, 5, 0));
    CHECK_THROWS(LeaseError, cache.core.truncate(id, 5, 0));
    CHECK_THROWS(LeaseError, cache.core.swap_out(id, 0));
    CHECK_THROWS(LeaseError, cache.core.fork(id, 0));
    cache.complete(cache.core.lease(id).swap_transfer);
    CHECK_EQ(cache.core.evict_device(9), 2u);
    CHECK_EQ(cache.core.evict_host(9), 0u);
    CHECK_EQ(cache.core.pending(id).blocks, 0u);  // does not walk the path anew
    CHECK_THROWS(LeaseError, cache.core.allocate(id, 4));
    CHECK(cache.core.allocate(id, 6) == Grant::kLoading);
    cache.check();
    CHECK_EQ(cache.core.lease(id).cached_tokens, 5u);
    cache.complete(cache.core.lease(id).onloads.front());
    CHECK_EQ(cache.core.statistics().attention.host.free, 2u);  // the path stays cached
    cache.core.release(id, 0);
}

TEST(a_swap_without_room_changes_nothing) {
    Cache cache(6, 5);
    const LeaseId first = cache.swapped(kPrompt);
    const LeaseId second = cache.computed({9, 9, 9, 9, 9});
    CHECK(!cache.swap_out(second));
    CHECK(cache.core.lease(second).has_blocks());
    CHECK_EQ(cache.core.statistics().attention.host.free, 2u);
    cache.core.release(first, 0);
    CHECK(cache.swap_out(second));  // takes the blocks that are no longer held
    cache.complete(cache.core.lease(second).swap_transfer);
    cache.core.release(second, 0);
}

TEST(a_failed_swap_keeps_the_table) {
    Cache cache(4, 4);
    const LeaseId id = cache.computed(kPrompt);
    const std::vector<BlockId> table = cache.core.lease(id).table;
    CHECK(cache.swap_out(id));
    cache.complete(cache.core.lease(id).swap_transfer, Outcome::kFailed, 2);
    CHECK(cache.core.lease(id).has_blocks() && !cache.core.lease(id).is(LeaseState::kSwapped));
    CHECK(cache.core.lease(id).table == table);
    CHECK_EQ(cache.core.statistics().attention.host.free,
             2u);  // the blocks that arrived are backups
    cache.core.release(id, 0);
}

TEST(blocks_moving_for_a_released_lease_are_freed_at_the_end) {
    Cache cache(4, 4);
    const LeaseId id = cache.computed(kPrompt);
    CHECK(cache.swap_out(id));
    const TransferId out = cache.core.lease(id).swap_transfer;
    cache.core.release(id, 0);
    cache.check();
    CHECK_EQ(cache.core.statistics().attention.device.free, 1u);
    cache.complete(out);
    CHECK_EQ(cache.core.statistics().attention.device.free, 2u);
    const LeaseId other = cache.swapped({7, 7, 7});
    cache.core.evict_device(9);
    CHECK(cache.core.allocate(other, 3) == Grant::kLoading);
    const TransferId in = cache.core.lease(other).onloads.front();
    cache.core.release(other, 0);
    cache.check();
    CHECK_EQ(cache.core.take_abandoned().size(), 1u);
    cache.complete(in, Outcome::kCancelled);
    CHECK_EQ(cache.core.statistics().attention.device.free, 4u);
}

TEST(blocks_from_before_a_reset_are_not_published_after_a_resume) {
    for (const Prompt& prompt : {kPrompt, Prompt{1}}) {
        Cache cache(4, 4);
        const LeaseId id = cache.swapped(prompt);
        cache.core.reset();
        cache.check();
        CHECK_EQ(cache.core.statistics().attention.host.free, 4u);
        CHECK(cache.core.allocate(id, 6) == Grant::kReady);
        CHECK_EQ(cache.core.lease(id).cached_tokens, 0u);
        cache.core.release(id, 0);
    }
}

TEST(a_swap_interrupted_by_a_reset_keeps_nothing) {
    Cache cache(4, 4);
    const LeaseId id = cache.computed(kPrompt);
    CHECK(cache.swap_out(id));
    cache.core.reset();
    cache.complete(cache.core.lease(id).swap_transfer);
    CHECK_EQ(cache.core.statistics().attention.device.free, 4u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 4u);
    cache.core.release(id, 0);
}

TEST(a_swap_waits_for_backups_in_flight) {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = config.host_blocks = 4;
    config.write_policy = SavePolicy::kWriteThrough;
    Core core(config);
    const LeaseId id = core.match(kPrompt, "").lease;
    CHECK(core.allocate(id, 5) == Grant::kReady);
    core.commit(id, 5, 0);
    const TransferId backup = core.take_backups();
    CHECK_EQ(core.saving(id), backup);
    core.complete(backup, Outcome::kFailed, 1);
    CHECK_EQ(core.saving(id), 0u);
    CHECK(core.swap_out(id, 0));
    CHECK_EQ(core.transfer(core.lease(id).swap_transfer).nodes.size(), 1u);
    CHECK_EQ(core.saving(id), 0u);  // its own transfer is no obstacle
    core.complete(core.lease(id).swap_transfer, Outcome::kDone, 0);
    CHECK(core.violations().empty());
}

TEST(steps_follow_blocks_through_swap_and_fork) {
    Cache cache(4, 8);
    const LeaseId id = cache.core.match(kPrompt, "").lease;
    CHECK(cache.core.allocate(id, 5) == Grant::kReady);
    cache.core.commit(id, 5, 1);
    const Fork fork = cache.core.fork(id, 2);
    CHECK_EQ(fork.target_blocks.size(), 1u);
    CHECK(cache.swap_out(fork.lease, 3));
    const TransferId out = cache.core.lease(fork.lease).swap_transfer;
    CHECK_EQ(cache.core.transfer(out).after_step, 2u);  // the clone's, not the open one
    cache.complete(out);
    CHECK_EQ(cache.core.unfinished_step(), 3u);
    cache.core.release(fork.lease, 3);
    cache.core.release(id, 3);
    cache.core.finish_step(3);
    CHECK_EQ(cache.core.unfinished_step(), 0u);
}

TEST(a_fork_shares_what_is_indexed) {
    Cache cache(4, 0);
    const LeaseId id = cache.computed(kPrompt);
    const Fork fork = cache.core.fork(id, 0);
    cache.check();
    const std::vector<BlockId>& ours = cache.core.lease(id).table;
    const std::vector<BlockId>& theirs = cache.core.lease(fork.lease).table;
    CHECK(std::equal(ours.begin(), ours.begin() + 2, theirs.begin()));
    CHECK(fork.source_blocks == std::vector<BlockId>{ours[2]});
    CHECK(fork.target_blocks == std::vector<BlockId>{theirs[2]});
    CHECK_EQ(cache.core.lease(fork.lease).cached_tokens, 5u);
    CHECK_EQ(cache.core.fork(id, 0).lease, 0u);  // no free blocks
    CHECK_EQ(cache.core.statistics().leases, 2u);
    cache.core.release(id, 0);
    cache.check();
    cache.core.release(fork.lease, 0);
}

TEST(more_than_511_swapped_leases_share_a_block) {
    constexpr std::size_t kLeases = 600;
    Cache cache(4, 700);
    std::vector<LeaseId> ids;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(kLeases); ++i) {
        ids.push_back(cache.swapped({1, 2, 100 + i}));
    }
    for (std::size_t i = 0; i + 1 < kLeases; ++i) cache.core.release(ids[i], 0);
    cache.check();
    cache.core.evict_device(4);
    CHECK_EQ(cache.core.evict_host(1), 0u);  // one lease still needs the shared block
    CHECK(cache.core.allocate(ids.back(), 3) == Grant::kLoading);
    cache.complete(cache.core.lease(ids.back()).onloads[0]);
    cache.core.release(ids.back(), 0);
    CHECK_EQ(cache.core.statistics().attention.host.free, 699u);
}
