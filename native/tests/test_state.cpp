// Auxiliary pools, and the state slots of leases (group_pool.cpp, recurrent_state.cpp).
#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

BlockId taken(GroupPool& pool) {
    BlockId id = kNoBlock;
    pool.take(id);
    return id;
}

// A core of 2-token blocks.
class Cache {
  public:
    explicit Cache(std::uint32_t state_slots) : core(config(state_slots)) {}
    ~Cache() { check(); }

    LeaseId matched(const Prompt& tokens) { return core.match(tokens, "").lease; }
    LeaseId granted(const Prompt& tokens) {
        const LeaseId id = matched(tokens);
        CHECK(core.allocate(id, static_cast<std::int64_t>(tokens.size())) != Grant::kNone);
        finish(id);
        return id;
    }
    void finish(LeaseId id, Outcome outcome = Outcome::kDone) {
        for (const TransferId move : std::vector(core.lease(id).onloads)) {
            core.complete(move, outcome, 0);
        }
        check();
    }
    // Computes `tokens` and saves the state after the first `saved` of them.
    void serve(const Prompt& tokens, std::int64_t saved) {
        const LeaseId id = granted(tokens);
        core.commit(id, saved, 0);
        CHECK(core.snapshot(id, saved, 0).target != kNoBlock);
        core.commit(id, static_cast<std::int64_t>(tokens.size()), 0);
        core.release(id, 0);
        check();
    }
    std::uint32_t hit(const Prompt& tokens) {
        const LeaseId id = matched(tokens);
        const std::uint32_t blocks = core.lease(id).device_hit;
        core.release(id, 0);
        return blocks;
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;

  private:
    static CoreConfig config(std::uint32_t state_slots) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = 32;
        config.state_slots = state_slots;
        return config;
    }
};

const Prompt kPrompt{1, 2, 3, 4, 5, 6, 7};

}  // namespace

TEST(idle_ids_are_evicted_least_recently_used_first) {
    GroupPool pool(3, 1);
    for (const NodeId node : {10u, 11u, 12u}) pool.attach(node, taken(pool));
    CHECK_EQ(pool.room(), 3u);
    pool.touch(pool.find(10));
    const BlockId oldest = pool.find(11);
    CHECK_EQ(taken(pool), oldest);
    CHECK_EQ(pool.find(11), kNoBlock);
    CHECK_EQ(pool.room(), 2u);
    pool.give_back(oldest, 0);
    CHECK_EQ(taken(pool), oldest);  // free ids first
}

TEST(a_held_id_is_not_evicted_and_remains_after_its_node) {
    GroupPool pool(2, 1);
    const BlockId held = taken(pool);
    pool.attach(1, held);
    pool.add_reader(held);
    pool.add_reader(held);
    CHECK_EQ(pool.room(), 1u);
    CHECK(pool.forget(1));
    CHECK(!pool.forget(1));
    pool.remove_reader(held);
    CHECK(!pool.is_free(held));
    pool.remove_reader(held);
    CHECK(pool.is_free(held));
    CHECK_EQ(pool.room(), 2u);
}

TEST(a_hit_ends_at_the_deepest_snapshot) {
    Cache cache(4);
    cache.serve(kPrompt, 4);
    CHECK_EQ(cache.hit(kPrompt), 2u);
    CHECK_EQ(cache.hit({1, 2, 3, 4, 9, 9, 9}), 2u);
    CHECK_EQ(cache.hit({1, 2, 3}), 0u);
    const LeaseId id = cache.matched(kPrompt);
    CHECK(cache.core.snapshot_points(id) == (std::vector<std::uint32_t>{6}));
    cache.core.release(id, 0);
}

TEST(moves_name_the_snapshot_or_zeros_and_wait_for_its_step) {
    Cache cache(3);
    LeaseId id = cache.matched(kPrompt);
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    CHECK_EQ(cache.core.move(cache.core.lease(id).onloads[0]).sources[0], kNoBlock);
    cache.finish(id);
    cache.core.commit(id, 6, 5);
    const BlockId saved = cache.core.snapshot(id, 6, 5).target;
    cache.core.release(id, 5);
    id = cache.matched(kPrompt);
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    const Move move = cache.core.move(cache.core.lease(id).onloads[0]);
    CHECK_EQ(move.sources[0], saved);
    CHECK_EQ(move.after_step, 5u);
    CHECK(move.targets[0] != saved);
    cache.core.finish_step(5);
    cache.core.release(id, 6);  // the target is the move's until that has ended
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.free, 1u);
    cache.check();
    for (const TransferId abandoned : cache.core.take_abandoned()) {
        cache.core.complete(abandoned, Outcome::kCancelled, 0);
    }
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.free, 2u);
}

TEST(the_only_slot_passes_to_the_lease_without_a_copy) {
    Cache cache(2);
    cache.serve(kPrompt, 6);
    const LeaseId other = cache.granted({9, 9});
    const LeaseId id = cache.matched(kPrompt);
    CHECK(cache.core.allocate(id, 7) == Grant::kReady);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 6u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.cached, 0u);
    const LeaseId late = cache.matched({8, 8});
    CHECK(cache.core.allocate(late, 2) == Grant::kNone);
    for (const LeaseId lease : {other, id, late}) cache.core.release(lease, 0);
}

TEST(commits_during_a_state_move_are_published_at_its_end) {
    Cache cache(3);
    const LeaseId id = cache.matched(kPrompt);
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    CHECK_EQ(cache.core.commit(id, 6, 0), 0u);
    CHECK_EQ(cache.core.statistics().published_blocks, 0u);
    cache.finish(id);
    CHECK_EQ(cache.core.statistics().published_blocks, 3u);
    cache.core.release(id, 0);
}

TEST(a_failed_move_restarts_the_lease_from_the_beginning) {
    Cache cache(3);
    cache.serve(kPrompt, 6);
    const LeaseId id = cache.matched(kPrompt);
    cache.core.allocate(id, 7);
    cache.finish(id, Outcome::kFailed);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 0u);
    CHECK_EQ(cache.core.commit(id, 7, 0), 0u);
    CHECK_THROWS(LeaseError, cache.core.recompute_from(id));
    cache.core.retract(id, 0);
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    cache.finish(id);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 6u);
    cache.core.release(id, 0);
}

TEST(dropping_a_block_drops_its_snapshot) {
    Cache cache(2);
    cache.serve(kPrompt, 6);
    cache.core.evict_device(1);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.cached, 0u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.free, 2u);
    CHECK_EQ(cache.hit(kPrompt), 0u);
}
