// Streams of block events: sweeps, changes, full queues; I1-I6 and the reports after every step.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

CoreConfig config_of(std::uint32_t device_blocks, std::uint32_t host_blocks) {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = device_blocks;
    config.host_blocks = host_blocks;
    config.write_policy = SavePolicy::kWriteThrough;
    return config;
}

Prompt prompt_of(std::int32_t first, std::int32_t tokens) {
    Prompt prompt;
    for (std::int32_t i = 0; i < tokens; ++i) prompt.push_back(first + i);
    return prompt;
}

class Cache {
  public:
    Cache(std::uint32_t device_blocks, std::uint32_t host_blocks)
        : core(config_of(device_blocks, host_blocks)) {}
    ~Cache() { check(); }

    void serve(const Prompt& tokens) {
        const LeaseId id = core.match(tokens, "salt").lease;
        const auto length = static_cast<std::int64_t>(tokens.size());
        CHECK(core.allocate(id, length) == Grant::kReady);
        core.commit(id, length, 0);
        core.release(id, 0);
        check();
    }
    void back_up() {
        core.complete(core.take_backups(), Outcome::kDone, 0);
        check();
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;
};

// Blocks by medium, as the events tell.
class View {
  public:
    explicit View(Cache& cache, std::size_t max_blocks = 100)
        : cache_(cache), id(cache.core.events().open(max_blocks, false)) {}

    std::vector<BlockRun> take(std::size_t max_blocks = 1) {
        std::vector<BlockRun> runs = cache_.core.events().drain(id, max_blocks);
        for (const BlockRun& run : runs) apply(run);
        cache_.check();
        return runs;
    }
    // The number of runs.
    std::size_t take_all(std::size_t max_blocks = 100) {
        std::size_t runs = 0;
        while (cache_.core.events().is_due(id)) runs += take(max_blocks).size();
        return runs;
    }
    std::size_t on(Medium medium) { return blocks[medium].size(); }

    std::map<Medium, std::set<Digest>> blocks;
    std::size_t clears = 0;

  private:
    void apply(const BlockRun& run) {
        if (run.event == BlockEvent::kCleared) {
            blocks.clear();
            ++clears;
        }
        if (run.event == BlockEvent::kStored) {
            CHECK(!run.has_parent || blocks[Medium::kDevice].contains(run.parent) ||
                  blocks[Medium::kHost].contains(run.parent));
            CHECK_EQ(run.tokens.size(), 2 * run.digests.size());
            CHECK_EQ(run.context, std::string("salt"));
        }
        for (const Digest& digest : run.digests) {
            if (run.event == BlockEvent::kStored) {
                blocks[run.medium].insert(digest);
            } else {
                CHECK_EQ(blocks[run.medium].erase(digest), 1u);
            }
        }
    }

    Cache& cache_;

  public:
    const EventStreamId id;
};

}  // namespace

TEST(a_stream_begins_with_what_is_there_and_reports_each_change) {
    Cache cache(16, 4);
    cache.serve(prompt_of(0, 7));
    cache.back_up();
    View view(cache);
    CHECK_EQ(view.take_all(), 2u);  // a run per medium
    CHECK_EQ(view.on(Medium::kDevice), 3u);
    CHECK_EQ(view.on(Medium::kHost), 3u);
    cache.serve(prompt_of(100, 5));
    view.take_all();
    CHECK_EQ(view.on(Medium::kDevice), 5u);
    CHECK_EQ(view.on(Medium::kHost), 3u);
    cache.core.forget_host();
    view.take_all();
    CHECK_EQ(view.on(Medium::kHost), 0u);
    cache.core.reset();
    CHECK_EQ(view.take_all(), 1u);
    CHECK_EQ(view.clears, 1u);
    CHECK_EQ(view.on(Medium::kDevice), 0u);
}

TEST(blocks_are_removed_from_each_tier_that_they_leave) {
    Cache cache(16, 8);
    View view(cache);
    cache.serve(prompt_of(0, 7));
    cache.back_up();
    cache.core.evict_device(3);
    view.take_all();
    CHECK_EQ(view.on(Medium::kDevice), 0u);
    CHECK_EQ(view.on(Medium::kHost), 3u);
    cache.core.evict_host(2);
    view.take_all();
    CHECK_EQ(view.on(Medium::kHost), 1u);
}

TEST(blocks_below_a_failed_onload_are_removed) {
    Cache cache(16, 8);
    View view(cache);
    cache.serve(prompt_of(0, 9));
    cache.back_up();
    cache.core.evict_device(4);
    const LeaseId id = cache.core.match(prompt_of(0, 9), "salt").lease;
    CHECK(cache.core.allocate(id, 9) == Grant::kLoading);
    cache.core.complete(cache.core.lease(id).onloads.front(), Outcome::kFailed, 1);
    view.take_all();
    CHECK_EQ(view.on(Medium::kDevice), 1u);
    CHECK_EQ(view.on(Medium::kHost), 1u);
    cache.core.release(id, 0);
}

TEST(a_block_that_comes_and_goes_during_a_sweep_is_reported_as_it_is) {
    Cache cache(64, 0);
    for (int i = 0; i < 20; ++i) cache.serve(prompt_of(100 * i, 5));
    View view(cache);
    for (int i = 20; i < 60; ++i) {
        view.take();
        cache.serve(prompt_of(100 * i, 5));
        cache.core.evict_device(1);
    }
    view.take_all();
    CHECK_EQ(view.on(Medium::kDevice), cache.core.blocks().size());
    CHECK_EQ(view.clears, 0u);
}

TEST(a_full_queue_begins_again_and_counts_what_it_has_dropped) {
    Cache cache(64, 0);
    View view(cache, 4);
    view.take_all();
    for (int i = 0; i < 3; ++i) cache.serve(prompt_of(100 * i, 5));
    CHECK_EQ(cache.core.events().counts(view.id).dropped_blocks, 5u);
    CHECK_EQ(cache.core.events().counts(view.id).restarts, 1u);
    view.take_all();
    CHECK_EQ(view.on(Medium::kDevice), 6u);
    CHECK_EQ(view.clears, 1u);
}

TEST(a_sweep_again_reports_all_blocks_to_streams_that_know_them) {
    Cache cache(64, 0);
    View view(cache);
    cache.serve(prompt_of(0, 9));
    view.take_all();
    cache.core.events().repeat(view.id);
    cache.core.events().repeat(view.id);  // the second one follows the first
    std::size_t blocks = 0;
    while (cache.core.events().is_due(view.id)) {
        for (const BlockRun& run : view.take()) blocks += run.digests.size();
    }
    CHECK_EQ(blocks, 8u);
    CHECK_EQ(view.on(Medium::kDevice), 4u);
}

TEST(a_closed_stream_is_refused) {
    Cache cache(8, 0);
    const EventStreamId id = cache.core.events().open(10, false);
    cache.core.events().close(id);
    CHECK_THROWS(UsageError, cache.core.events().drain(id, 1));
    CHECK_THROWS(UsageError, cache.core.events().is_due(id));
}
