// Snapshots of recurrent state in host memory (host_copies.cpp).
#include "aiokv/core.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

const Prompt kPrompt{1, 2, 3, 4, 5, 6, 7};
const Prompt kShort{8, 8};
const Prompt kOther{9, 2, 3, 4, 5, 6, 7};

// A core of 2-token blocks with two state slots: of a lease, and of a snapshot.
class Cache {
  public:
    explicit Cache(SavePolicy policy = SavePolicy::kWriteThrough) : core(config(policy)) {}
    ~Cache() { check(); }

    // Computes a prompt and saves the state after its first 6 tokens.
    void serve(const Prompt& tokens, Step step = 0) {
        const LeaseId id = core.match(tokens, "").lease;
        CHECK(core.allocate(id, 7) != Grant::kNone);
        for (const TransferId move : std::vector(core.lease(id).onloads)) {
            core.complete(move, Outcome::kDone, 0);
        }
        core.commit(id, 7 - 1, step);
        core.snapshot(id, 6, step);
        core.release(id, step);
        check();
    }
    std::uint32_t save_all(Outcome outcome = Outcome::kDone) {
        std::uint32_t saves = 0;
        while (const TransferId id = core.take_group_save()) {
            check();
            core.complete(id, outcome, 0);
            check();
            ++saves;
        }
        return saves;
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
    static CoreConfig config(SavePolicy policy) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = 32;
        config.host_blocks = 32;
        config.write_policy = policy;
        config.state_slots = 2;
        config.host_state_slots = 2;
        return config;
    }
};

}  // namespace

TEST(an_evicted_snapshot_is_restored_from_the_host) {
    Cache cache;
    cache.serve(kPrompt);
    CHECK(cache.core.wants_backups());
    CHECK_EQ(cache.save_all(), 1u);
    cache.serve(kOther);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.evicted_blocks(), 1u);
    CHECK_EQ(cache.hit(kPrompt), 3u);
    const LeaseId id = cache.core.match(kPrompt, "").lease;
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    const TransferId move = cache.core.lease(id).onloads[0];
    CHECK(cache.core.move(move).route == MoveRoute::kFromHost);
    CHECK_EQ(cache.core.move(move).targets[0], cache.core.lease(id).recurrent.slot);
    cache.core.complete(move, Outcome::kDone, 0);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 6u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).onloaded_blocks, 1u);
    cache.core.release(id, 0);
}

TEST(a_failed_restore_drops_the_host_snapshot_and_a_cancelled_one_does_not) {
    for (const Outcome outcome : {Outcome::kFailed, Outcome::kCancelled}) {
        Cache cache;
        cache.serve(kPrompt);
        cache.save_all();
        cache.serve(kOther);
        const LeaseId id = cache.core.match(kPrompt, "").lease;
        CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
        cache.core.complete(cache.core.lease(id).onloads[0], outcome, 0);
        CHECK_EQ(cache.core.lease(id).cached_tokens, 0u);
        cache.core.release(id, 0);
        CHECK_EQ(cache.hit(kPrompt), outcome == Outcome::kFailed ? 0u : 3u);
    }
}

TEST(a_save_waits_until_the_step_of_its_snapshot_is_closed) {
    Cache cache;
    cache.serve(kPrompt, 4);
    CHECK_EQ(cache.core.take_group_save(), 0u);
    cache.core.close_step(4);
    const TransferId save = cache.core.take_group_save();
    CHECK_EQ(cache.core.move(save).after_step, 4u);
    cache.core.finish_step(4);
    cache.core.complete(save, Outcome::kDone, 0);
}

TEST(a_snapshot_that_is_being_saved_is_neither_evicted_nor_saved_twice) {
    Cache cache;
    cache.serve(kPrompt);
    const TransferId save = cache.core.take_group_save();
    CHECK_EQ(cache.core.take_group_save(), 0u);
    const LeaseId first = cache.core.match(kOther, "").lease;
    const LeaseId second = cache.core.match(kShort, "").lease;
    CHECK(cache.core.allocate(first, 7) != Grant::kNone);
    CHECK(cache.core.allocate(second, 2) == Grant::kNone);
    CHECK(!cache.core.can_allocate(second, 2, false));
    cache.core.complete(save, Outcome::kDone, 0);
    CHECK(cache.core.allocate(second, 2) != Grant::kNone);
    for (const LeaseId id : {first, second}) {
        for (const TransferId move : std::vector(cache.core.lease(id).onloads)) {
            cache.core.complete(move, Outcome::kDone, 0);
        }
        cache.core.release(id, 0);
    }
}

TEST(a_save_of_a_dropped_block_frees_both_slots) {
    Cache cache;
    cache.serve(kPrompt);
    const TransferId save = cache.core.take_group_save();
    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.free, 1u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).host.free, 1u);
    cache.core.complete(save, Outcome::kDone, 0);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.free, 2u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).host.free, 2u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).offloaded_blocks, 0u);
}

TEST(a_failed_save_is_tried_again_at_the_next_use) {
    Cache cache;
    cache.serve(kPrompt);
    CHECK_EQ(cache.save_all(Outcome::kFailed), 1u);
    CHECK_EQ(cache.save_all(), 0u);
    const LeaseId id = cache.core.match(kPrompt, "").lease;
    CHECK(cache.core.allocate(id, 7) == Grant::kLoading);
    cache.core.complete(cache.core.lease(id).onloads[0], Outcome::kDone, 0);
    CHECK_EQ(cache.save_all(), 1u);
    cache.core.release(id, 0);
}

TEST(each_tier_is_forgotten_alone) {
    Cache cache;
    cache.serve(kPrompt);
    cache.save_all();
    cache.core.forget_host();
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).host.free, 2u);
    CHECK_EQ(cache.hit(kPrompt), 3u);
    cache.core.reset();
    cache.serve(kPrompt);
    const TransferId blocks = cache.core.take_backups();
    cache.core.complete(blocks, Outcome::kDone, 0);
    cache.save_all();
    cache.core.forget_device();
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).device.cached, 0u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).host.cached, 1u);
}

TEST(the_selective_policy_counts_the_uses_of_the_block) {
    Cache cache(SavePolicy::kNthUse);
    cache.serve(kPrompt);
    CHECK_EQ(cache.save_all(), 0u);
    cache.serve(kPrompt);
    CHECK_EQ(cache.save_all(), 1u);
    CHECK_EQ(cache.core.group_statistics(kRecurrentState).host.cached, 1u);
}
