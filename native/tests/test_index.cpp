// Block pool, prefix tree and core. Invariants I1-I6 after every step.
#include <pthread.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "aiokv/slab.hpp"
#include "check.hpp"
#include "report.hpp"

using namespace aiokv;

namespace {

// Returns the child with these tokens, which is added if there is none.
NodeId child(PrefixTree& tree, NodeId parent, const std::int32_t* tokens) {
    std::vector<NodeId> path;
    tree.find_or_add_path(parent, tokens, {}, 1, path);
    return path.front();
}

std::vector<BlockId> lowest(BlockPool& pool, std::size_t count) {
    std::vector<BlockId> ids(count);
    pool.take_lowest(ids);
    return ids;
}

std::vector<BlockId> range(BlockId first, BlockId last) {
    std::vector<BlockId> ids(static_cast<std::size_t>(last - first));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

// A core of 2-token blocks, whose invariants are checked with every call.
class Cache {
  public:
    explicit Cache(std::uint32_t device_blocks, std::uint32_t host_blocks = 0)
        : core(config(device_blocks, host_blocks)) {}
    ~Cache() { check(); }

    LeaseId match(const std::vector<std::int32_t>& tokens) {
        const Hit hit = core.match(tokens, "");
        device_hit = hit.device_blocks;
        host_hit = hit.host_blocks;
        check();
        return hit.lease;
    }
    Grant allocate(LeaseId id, std::int64_t num_tokens) {
        const Grant grant = core.allocate(id, num_tokens);
        check();
        return grant;
    }
    // A request that computes all its blocks and stays.
    LeaseId serve(const std::vector<std::int32_t>& tokens) {
        const LeaseId id = match(tokens);
        CHECK(allocate(id, static_cast<std::int64_t>(tokens.size())) != Grant::kNone);
        core.commit(id, static_cast<std::int64_t>(tokens.size()), 0);
        check();
        return id;
    }
    void release(LeaseId id) {
        core.release(id, 0);
        check();
    }
    void complete(TransferId id, Outcome outcome, std::uint32_t first_bad = 0) {
        core.complete(id, outcome, first_bad);
        check();
    }
    // The blocks of these tokens are on the host only.
    void to_host(const std::vector<std::int32_t>& tokens) {
        release(serve(tokens));
        complete(core.take_backups(), Outcome::kDone);
        core.evict_device(static_cast<std::uint32_t>(tokens.size() / 2));
        check();
    }
    std::vector<BlockId> table(LeaseId id) const { return core.lease(id).table; }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;
    std::uint32_t device_hit = 0;
    std::uint32_t host_hit = 0;

  private:
    static CoreConfig config(std::uint32_t device_blocks, std::uint32_t host_blocks) {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = device_blocks;
        config.host_blocks = host_blocks;
        config.write_policy = host_blocks > 0 ? SavePolicy::kWriteThrough : SavePolicy::kNone;
        return config;
    }
};

}  // namespace

// -- slab ------------------------------------------------------------------------------------

TEST(slab_works_where_no_thread_can_be_started) {
    constexpr std::size_t kCount = std::size_t{1} << 23;  // 32 MiB: a thread would populate half
    pthread_attr_t usual;
    CHECK_EQ(pthread_getattr_default_np(&usual), 0);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    CHECK_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 60), 0);
    CHECK_EQ(pthread_setattr_default_np(&huge), 0);
    try {
        Slab<std::uint32_t> slab(kCount, kCount);
        slab.grow(kCount);
        slab[kCount - 1] = 7;
        CHECK_EQ(slab[kCount - 1] + slab[0], 7u);
    } catch (const std::system_error&) {
        CHECK(false);
    }
    pthread_setattr_default_np(&usual);
    pthread_attr_destroy(&huge);
    pthread_attr_destroy(&usual);
}

// -- pool ------------------------------------------------------------------------------------

TEST(pool_gives_each_id_once) {
    BlockPool pool(5000);
    std::set<BlockId> seen;
    for (const std::size_t count : {0u, 1u, 63u, 64u, 65u, 4096u}) {
        for (const BlockId id : lowest(pool, count)) CHECK(seen.insert(id).second);
        CHECK_EQ(pool.free_blocks(), 5000 - seen.size());
    }
    CHECK_EQ(*seen.rbegin(), BlockId(seen.size() - 1));
    for (const BlockId id : seen) pool.give_back(id);
    CHECK_EQ(pool.free_blocks(), 5000u);
    CHECK(lowest(pool, 5000) == range(0, 5000));
}

// 9,000 ids have three words of the bitmap's summary.
TEST(pool_of_many_words_gives_the_lowest_ids) {
    BlockPool pool(9000);
    std::set<BlockId> free;
    for (BlockId id = 0; id < 9000; ++id) free.insert(id);
    std::vector<BlockId> out;
    std::mt19937 random(7);
    for (int turn = 0; turn < 400; ++turn) {
        std::vector<BlockId> ids(random() % 300);
        if (ids.size() <= free.size()) {
            pool.take_lowest(ids);
            auto next = free.begin();
            for (const BlockId id : ids) CHECK_EQ(id, *next++);
            for (const BlockId id : ids) free.erase(id);
            out.insert(out.end(), ids.begin(), ids.end());
        }
        std::shuffle(out.begin(), out.end(), random);
        for (std::size_t back = std::min<std::size_t>(out.size(), random() % 300); back-- > 0;) {
            pool.give_back(out.back());
            free.insert(out.back());
            out.pop_back();
        }
        CHECK_EQ(pool.free_blocks(), free.size());
    }
}

TEST(pool_refuses_ids_that_are_not_allocated) {
    BlockPool pool(10);
    lowest(pool, 5);
    pool.give_back(3);
    for (const BlockId id : {3, 7, 10, -1, 1 << 30}) {
        CHECK_THROWS(InternalError, (pool.give_back(id), 0));
    }
    CHECK_EQ(pool.free_blocks(), 6u);
    for (const BlockPool::Extent beyond :
         {BlockPool::Extent{8, 3}, BlockPool::Extent{10, 1}, BlockPool::Extent{kNoBlock, 1}}) {
        const std::uint32_t free = pool.free_blocks();
        CHECK_THROWS(InternalError, pool.give_back(beyond));
        CHECK_EQ(pool.free_blocks(), free);
    }
}

TEST(pool_resizes) {
    BlockPool pool(5);
    const auto used = lowest(pool, 5);
    pool.resize(200);
    CHECK_EQ(pool.free_blocks(), 195u);
    CHECK(lowest(pool, 195) == range(5, 200));
    for (BlockId id = 5; id < 199; ++id) pool.give_back(id);
    CHECK_THROWS(UsageError, (pool.resize(100), 0));
    CHECK_EQ(pool.capacity(), 200u);
    CHECK_EQ(pool.free_blocks(), 194u);
    pool.give_back(199);
    pool.resize(5);
    CHECK_EQ(pool.free_blocks(), 0u);
    for (const BlockId id : used) pool.give_back(id);
    pool.resize(0);
    CHECK_EQ(pool.free_blocks(), 0u);
    pool.resize(65);
    CHECK(lowest(pool, 65) == range(0, 65));
}

TEST(cooling_ids_are_allocated_last) {
    DevicePool pool(4);
    std::vector<BlockId> ids(3);
    pool.take(ids);
    for (const BlockId id : ids) pool.use_in(id, 7);
    for (const BlockId id : ids) pool.give_back(id);
    CHECK_EQ(pool.free_blocks(), 4u);
    CHECK_EQ(pool.cooling_blocks(), 3u);
    std::vector<BlockId> next(2);
    pool.take(next);
    CHECK_EQ(next[0], 3);
    CHECK_EQ(pool.after_step(next[0]), 0u);
    CHECK_EQ(pool.after_step(next[1]), 7u);
    pool.finish_step(7);
    CHECK_EQ(pool.cooling_blocks(), 0u);
    CHECK_EQ(pool.after_step(next[1]), 0u);
}

TEST(ids_of_a_finished_step_are_free_and_none_is_allocated_twice) {
    DevicePool pool(1'000);
    std::vector<BlockId> ids(900);
    pool.take(ids);
    for (const BlockId id : ids) pool.use_in(id, id < 500 ? 7 : 8);
    for (const BlockId id : ids) pool.give_back(id);
    pool.finish_step(7);
    CHECK_EQ(pool.free_blocks(), 1'000u);
    CHECK_EQ(pool.cooling_blocks(), 400u);
    for (const BlockId id : ids) CHECK(pool.is_free(id));
    std::vector<bool> taken(1'000, false);
    for (std::size_t i = 0; i < 600; ++i) {
        std::vector<BlockId> one(1);
        pool.take(one);
        CHECK(!taken[static_cast<std::size_t>(one[0])]);
        taken[static_cast<std::size_t>(one[0])] = true;
        CHECK_EQ(pool.after_step(one[0]), 0u);  // ids of step 8 are allocated last
    }
    CHECK_EQ(pool.free_blocks(), 400u);
    pool.finish_step(8);
    for (std::size_t i = 0; i < taken.size(); ++i) {
        if (taken[i]) pool.give_back(static_cast<BlockId>(i));
    }
    pool.resize(10);
    CHECK_EQ(pool.free_blocks(), 10u);
}

TEST(ids_go_back_together_in_any_order) {
    std::vector<BlockId> shuffled = range(0, 200);
    std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(1));
    std::vector<BlockId> descending(range(0, 200));
    std::reverse(descending.begin(), descending.end());
    for (const std::vector<BlockId>& order : {range(0, 200), descending, shuffled}) {
        DevicePool pool(200);
        std::vector<BlockId> ids(200);
        pool.take(ids);
        for (const BlockId id : {0, 63, 64, 130}) pool.use_in(id, 7);
        pool.give_back_all(200, [&](std::uint32_t i) { return order[i]; });
        CHECK_EQ(pool.free_blocks(), 200u);
        CHECK_EQ(pool.cooling_blocks(), 4u);
        std::vector<BlockId> rested(196);
        pool.take(rested);
        for (const BlockId id : rested) CHECK_EQ(pool.after_step(id), 0u);
        pool.finish_step(7);
        for (const BlockId id : {0, 63, 64, 130}) CHECK(pool.is_free(id));
    }
}

// -- tree ------------------------------------------------------------------------------------

TEST(tree_finds_children_of_forks) {
    constexpr std::int32_t kChildren = 30'000;  // more than one table takes
    constexpr std::size_t kStorage = 16;  // no compiler warns of the copy for blocks of 16 tokens
    PrefixTree tree(2, 1, 0);
    const NodeId root = tree.add_root();
    std::vector<NodeId> children;
    for (std::int32_t i = 0; i < kChildren; ++i) {
        const std::int32_t tokens[kStorage] = {i, -i};
        CHECK_EQ(tree.find_child(root, tokens), kNone);
        children.push_back(child(tree, root, tokens));
        CHECK_EQ(child(tree, root, tokens), children.back());
    }
    // remove every other node; the rest is found, and the removed ones are not
    for (std::size_t i = 0; i < children.size(); i += 2) {
        tree.unlink(children[i]);
        tree.free(children[i]);
    }
    for (std::int32_t i = 0; i < kChildren; ++i) {
        const std::int32_t tokens[kStorage] = {i, -i};
        const NodeId expected = i % 2 ? children[static_cast<std::size_t>(i)] : kNone;
        CHECK_EQ(tree.find_child(root, tokens), expected);
    }
    std::set<NodeId> rest;
    tree.for_each_child(root, [&](NodeId child) { CHECK(rest.insert(child).second); });
    CHECK_EQ(rest.size(), children.size() / 2);
    for (std::size_t i = 1; i < children.size(); i += 2) {
        tree.unlink(children[i]);
        tree.free(children[i]);
    }
    CHECK_EQ(tree.live_nodes(), 1u);
    CHECK(!tree.has_child(root));
}

namespace {

// Six blocks of one token each, in one run.
struct Chain {
    PrefixTree tree{1, 8, 0};
    NodeId root = tree.add_root();
    std::vector<std::int32_t> tokens{10, 11, 12, 13, 14, 15};
    std::vector<NodeId> path;

    Chain() { tree.add_chain(root, tokens.data(), {}, tokens.size(), path); }
    std::vector<NodeId> find(std::vector<std::int32_t> prompt) const {
        std::vector<NodeId> found;
        tree.find_path(root, prompt.data(), {}, prompt.size(), found);
        return found;
    }
    std::size_t runs() const {
        std::set<RunId> ids;
        for (const NodeId node : path) ids.insert(tree.run_of(node));
        return ids.size();
    }
    void check() const {
        Report report(0, 0, tree.end_id());
        tree.check(report);
        CHECK(report.take().empty());
    }
};

struct Splits : SplitListener {
    void on_split(RunId split, RunId made, bool made_is_above) override {
        seen.emplace_back(split, made, made_is_above);
    }
    std::vector<std::tuple<RunId, RunId, bool>> seen;
};

}  // namespace

TEST(a_chain_is_one_run_and_is_found_as_far_as_tokens_are_equal) {
    const Chain c;
    CHECK_EQ(c.runs(), 1u);
    CHECK(c.find(c.tokens) == c.path);
    CHECK(c.find({10, 11, 12, 99, 14}) == std::vector(c.path.begin(), c.path.begin() + 3));
    CHECK(c.find({99}).empty());
    CHECK_EQ(c.tree.parent(c.path[0]), c.root);
    CHECK_EQ(c.tree.parent(c.path[4]), c.path[3]);
    CHECK_EQ(c.tree.only_child(c.path[3]), c.path[4]);
    CHECK(!c.tree.has_child(c.path[5]));
    c.check();
}

TEST(a_split_changes_neither_ids_nor_what_is_found) {
    for (std::size_t at = 1; at < 6; ++at) {
        Chain c;
        c.tree.run(c.path[0]).refs = 3;
        const RunId lower = c.tree.split_before(c.path[at]);
        CHECK_EQ(c.runs(), 2u);
        CHECK_EQ(c.tree.run_of(c.path[at]), lower);
        CHECK_EQ(c.tree.split_before(c.path[at]), lower);
        for (const NodeId node : c.path) CHECK_EQ(c.tree.refs(node), 3u);
        CHECK(c.find(c.tokens) == c.path);
        CHECK_EQ(c.tree.parent(c.path[at]), c.path[at - 1]);
        CHECK_EQ(c.tree.only_child(c.path[at - 1]), c.path[at]);
        c.check();
        const RunId upper = c.tree.run_of(c.path[at - 1]);
        CHECK(c.tree.continues(upper, lower));
        c.tree.join(upper, lower, at > 3 ? upper : lower);
        CHECK_EQ(c.runs(), 1u);
        CHECK(c.find(c.tokens) == c.path);
        c.check();
    }
}

TEST(a_fork_inside_a_run_splits_it) {
    Chain c;
    const std::int32_t other = 99;
    const NodeId side = child(c.tree, c.path[2], &other);
    CHECK_EQ(c.runs(), 2u);
    CHECK_EQ(c.tree.children(c.path[2]), 2u);
    CHECK(c.find({10, 11, 12, 99}).back() == side);
    CHECK(c.find(c.tokens) == c.path);
    CHECK(!c.tree.continues(c.tree.run_of(c.path[2]), c.tree.run_of(c.path[3])));
    c.check();
    c.tree.unlink(side);
    c.tree.free(side);
    CHECK(c.tree.continues(c.tree.run_of(c.path[2]), c.tree.run_of(c.path[3])));
    c.check();
}

TEST(a_queue_is_told_of_the_part_with_the_new_run) {
    Chain c;
    Splits splits;
    c.tree.listen(splits);
    const RunId run = c.tree.run_of(c.path[0]);
    c.tree.split_before(c.path[4]);  // not queued
    CHECK(splits.seen.empty());
    c.tree.runs()[run].set(kQueued);
    c.tree.split_before(c.path[1]);
    c.tree.split_before(c.path[3]);
    CHECK_EQ(splits.seen.size(), 2u);
    CHECK(splits.seen[0] == std::tuple(run, c.tree.run_of(c.path[0]), true));
    CHECK(splits.seen[1] == std::tuple(run, c.tree.run_of(c.path[3]), false));
    for (std::size_t i = 0; i < 4; ++i) CHECK(c.tree.run(c.path[i]).has(kQueued));
}

TEST(trimmed_and_freed_blocks_leave_their_run) {
    Chain c;
    c.tree.trim(c.tree.run_of(c.path[0]), 2);
    CHECK(c.find(c.tokens) == std::vector(c.path.begin(), c.path.begin() + 4));
    CHECK(!c.tree.is_live(c.path[4]));
    CHECK(!c.tree.has_child(c.path[3]));
    CHECK_THROWS(InternalError, c.tree.free(c.path[1]));
    // Detached blocks may go in any order.
    c.tree.unlink(c.path[0]);
    for (std::size_t i = 0; i < 4; ++i) {
        c.tree[c.path[i]].set(kDetached);
        c.tree.forget_children(c.path[i]);
    }
    for (const std::size_t i : {1u, 0u, 3u, 2u}) c.tree.free(c.path[i]);
    CHECK_EQ(c.tree.live_nodes(), 1u);
    std::vector<NodeId> again;
    c.tree.add_chain(c.root, c.tokens.data(), {}, c.tokens.size(), again);
    CHECK(again == c.path);  // the lowest slots, in one run
    CHECK_EQ(c.runs(), 1u);
}

TEST(a_run_whose_slots_are_not_consecutive_is_several) {
    Chain c;
    const std::int32_t other = 99;
    const NodeId barrier = child(c.tree, c.root, &other);
    c.tree.trim(c.tree.run_of(c.path[0]), 2);
    std::vector<NodeId> path;
    c.tree.add_chain(barrier, c.tokens.data(), {}, 4, path);
    CHECK(path == (std::vector<NodeId>{c.path[4], c.path[5], barrier + 1, barrier + 2}));
    CHECK(c.find({99, 10, 11, 12, 13}).size() == 5);
    c.check();
}

TEST(pool_gives_extents_of_consecutive_ids) {
    BlockPool pool(200);
    for (const std::uint32_t count : {60u, 70u}) CHECK_EQ(pool.take_extent(count).count, count);
    pool.give_back(BlockPool::Extent{10, 5});
    pool.give_back(BlockPool::Extent{63, 2});
    CHECK_EQ(pool.free_blocks(), 77u);
    const BlockPool::Extent first = pool.take_extent(9);
    CHECK_EQ(first.first, 10);
    CHECK_EQ(first.count, 5u);
    const BlockPool::Extent second = pool.take_extent(9);
    CHECK_EQ(second.first, 63);
    CHECK_EQ(second.count, 2u);
    const BlockPool::Extent rest = pool.take_extent(1000);
    CHECK_EQ(rest.first, 130);
    CHECK_EQ(rest.count, 70u);
    pool.give_back(BlockPool::Extent{0, 200});
    CHECK_THROWS(InternalError, pool.give_back(BlockPool::Extent{199, 1}));
    CHECK_EQ(pool.free_blocks(), 200u);
}

TEST(a_deep_tree_is_walked_without_recursion) {
    Cache cache(50'001);
    std::vector<std::int32_t> tokens(100'001);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i % 7);
    cache.release(cache.serve(tokens));
    cache.match(tokens);
    CHECK_EQ(cache.device_hit, 50'000u);
    cache.core.reset();
    CHECK_EQ(cache.core.statistics().attention.device.free, 50'001u);
}

// -- leases ----------------------------------------------------------------------------------

TEST(a_prompt_is_found_again) {
    Cache cache(10);
    cache.release(cache.serve({1, 2, 3, 4, 5, 6, 7}));
    const LeaseId longer = cache.match({1, 2, 3, 4, 5, 6, 7, 8});
    CHECK_EQ(cache.device_hit, 3u);
    cache.match({1, 2, 3, 4, 9, 9, 9});
    CHECK_EQ(cache.device_hit, 2u);
    cache.match({1, 2, 3, 4});  // the last token is computed
    CHECK_EQ(cache.device_hit, 1u);
    cache.match({9});
    CHECK_EQ(cache.device_hit, 0u);
    CHECK(cache.allocate(longer, 8) == Grant::kReady);
    CHECK_EQ(cache.core.lease(longer).cached_tokens, 6u);
    CHECK_EQ(cache.core.evict_device(10), 0u);  // I5
    cache.release(longer);
    CHECK_EQ(cache.core.evict_device(10), 3u);  // the deepest first, one by one
}

TEST(the_deepest_block_is_evicted_first) {
    Cache cache(10);
    cache.release(cache.serve({1, 2, 3, 4, 5, 6}));
    CHECK_EQ(cache.core.evict_device(1), 1u);
    cache.match({1, 2, 3, 4, 5, 6, 7});
    CHECK_EQ(cache.device_hit, 2u);
}

TEST(misuse_changes_nothing) {
    Cache cache(10);
    const LeaseId id = cache.match({1, 2, 3});
    CHECK_THROWS(UsageError, cache.core.match({}, ""));
    CHECK_THROWS(LeaseError, cache.core.commit(id, 0, 0));
    CHECK_THROWS(LeaseError, (cache.core.truncate(id, 0, 0), 0));
    CHECK_THROWS(LeaseError, cache.core.allocate(id, 0));
    CHECK_THROWS(LeaseError, cache.core.allocate(id, std::int64_t{1} << 31));
    CHECK_THROWS(RequestTooLarge, cache.core.allocate(id, 21));
    CHECK_THROWS(LeaseError, cache.core.allocate(id + (LeaseId{1} << 32), 3));
    CHECK(cache.allocate(id, 4) == Grant::kReady);
    CHECK_THROWS(LeaseError, cache.core.allocate(id, 4));
    CHECK_THROWS(LeaseError, cache.core.commit(id, 5, 0));
    const std::vector<std::int32_t> two{4, 5};
    CHECK_THROWS(LeaseError, (cache.core.append(id, two), 0));
    const std::vector<LeaseId> twice{id, id};
    CHECK_THROWS(LeaseError, cache.core.extend(twice, 1));
    CHECK_EQ(cache.core.lease(id).tokens.size(), 3u);
    cache.release(id);
    CHECK_THROWS(LeaseError, (cache.core.release(id, 0), 0));
    CHECK_EQ(cache.core.statistics().attention.device.free, 10u);
}

TEST(the_first_of_two_copies_wins) {
    Cache cache(10);
    const LeaseId a = cache.match({1, 2, 3, 4, 5});
    const LeaseId b = cache.match({1, 2, 3, 4, 5});
    cache.allocate(a, 5);
    cache.allocate(b, 5);
    const auto table = cache.table(b);
    CHECK_EQ(cache.core.commit(a, 4, 0), 2u);
    CHECK_EQ(cache.core.commit(b, 4, 0), 0u);
    CHECK(cache.table(b) == table);
    cache.release(a);
    CHECK_EQ(cache.core.evict_device(10), 0u);  // b holds refs on a's copies
    cache.release(b);
    CHECK_EQ(cache.core.statistics().attention.device.free, 8u);
}

TEST(all_leases_are_extended_or_none) {
    Cache cache(4);
    const LeaseId a = cache.serve({1, 2});
    const LeaseId b = cache.serve({3, 4});
    const std::vector<LeaseId> both{a, b};
    CHECK(cache.core.extend(both, 2));
    CHECK(!cache.core.extend(both, 1));
    CHECK_EQ(cache.core.lease(a).num_tokens, 4u);
    cache.core.truncate(b, 2, 0);
    const std::vector<LeaseId> one{a};
    CHECK(cache.core.extend(one, 1));
    cache.release(a);
    cache.release(b);
}

// -- two tiers -------------------------------------------------------------------------------

TEST(host_blocks_are_onloaded) {
    Cache cache(4, 8);
    cache.to_host({1, 2, 3, 4});
    const LeaseId id = cache.match({1, 2, 3, 4, 5});
    CHECK_EQ(cache.host_hit, 2u);
    CHECK(cache.allocate(id, 5) == Grant::kLoading);
    const LeaseId joined = cache.match({1, 2, 3});
    CHECK(cache.allocate(joined, 3) == Grant::kLoading);
    CHECK_EQ(cache.table(joined)[0], cache.table(id)[0]);
    const TransferId onload = cache.core.lease(id).onloads[0];
    CHECK_EQ(cache.core.lease(joined).onloads[0], onload);
    cache.release(id);
    CHECK(cache.core.take_abandoned().empty());  // another lease waits for it
    cache.complete(onload, Outcome::kDone);
    CHECK_EQ(cache.core.statistics().attention.onloaded_blocks, 2u);
    cache.release(joined);
    CHECK_THROWS(InternalError, (cache.core.complete(onload, Outcome::kDone, 0), 0));
}

TEST(a_failed_onload_is_not_served) {
    Cache cache(6, 8);
    cache.to_host({1, 2, 3, 4, 5, 6});
    const LeaseId id = cache.match({1, 2, 3, 4, 5, 6, 7});
    cache.allocate(id, 7);
    const auto table = cache.table(id);
    cache.core.commit(id, 7, 0);
    cache.complete(cache.core.lease(id).onloads[0], Outcome::kFailed, 1);
    CHECK_EQ(cache.core.lease(id).cached_tokens, 2u);
    CHECK(cache.table(id) == table);
    cache.match({1, 2, 3, 4, 5, 6, 7});
    CHECK_EQ(cache.device_hit + cache.host_hit, 1u);
    CHECK_EQ(cache.core.commit(id, 7, 0), 0u);  // not taken note of yet
    CHECK_EQ(cache.core.recompute_from(id), 2);
    CHECK_EQ(cache.core.commit(id, 7, 0), 2u);
    cache.match({1, 2, 3, 4, 5, 6, 7});
    CHECK_EQ(cache.device_hit, 3u);
    cache.release(id);
}

TEST(blocks_computed_behind_a_cancelled_onload_are_not_kept) {  // I2
    Cache cache(12, 8);
    const LeaseId slow = cache.match({1, 2, 3, 4, 5});  // not cached yet: computes itself
    CHECK(cache.allocate(slow, 5) == Grant::kReady);
    cache.to_host({1, 2});
    const LeaseId reader = cache.match({1, 2, 9});
    CHECK(cache.allocate(reader, 3) == Grant::kLoading);
    const TransferId onload = cache.core.lease(reader).onloads[0];
    cache.core.commit(slow, 2, 0);  // its block exists already: loading
    cache.check();
    cache.release(reader);
    CHECK_EQ(cache.core.take_abandoned().size(), 1u);
    cache.complete(onload, Outcome::kCancelled);
    cache.core.commit(slow, 4, 0);
    cache.check();
    cache.release(slow);
    const LeaseId again = cache.match({1, 2, 3, 4, 5});
    CHECK_EQ(cache.device_hit, 2u);
    cache.release(again);
}

TEST(reset_leaves_leases_and_transfers_their_blocks) {  // I8
    Cache cache(6, 6);
    cache.to_host({1, 2, 3, 4});
    const LeaseId reader = cache.match({1, 2, 3, 4, 5});
    cache.allocate(reader, 5);
    const LeaseId writer = cache.serve({7, 8, 9});
    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.take_backups(), 0u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 4u);  // the onload still reads two
    cache.complete(cache.core.lease(reader).onloads[0], Outcome::kDone);
    CHECK_EQ(cache.core.commit(writer, 3, 0), 0u);
    cache.release(reader);
    cache.release(writer);
    CHECK_EQ(cache.core.statistics().attention.device.free, 6u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 6u);
}

TEST(a_reset_without_leases_frees_all_blocks) {  // I8
    Cache cache(64, 64);
    for (int round = 0; round < 3; ++round) {
        cache.to_host({1, 2, 3, 4});
        for (const std::int32_t child : {5, 6, 7}) cache.release(cache.serve({8, 9, child, 0, 1}));
        cache.complete(cache.core.take_backups(), Outcome::kDone);
        cache.release(cache.serve({8, 9, 8, 0, 1}));  // on the device only
        const Hit other = cache.core.match({{1, 2, 3}}, "other");
        cache.allocate(other.lease, 3);
        cache.core.commit(other.lease, 3, 0);
        cache.release(other.lease);
        const std::uint32_t blocks = cache.core.statistics().nodes - 2;  // without the roots
        const std::uint64_t before = total(cache.core.statistics().dropped_by_cause);

        cache.core.reset();
        cache.check();
        CHECK_EQ(total(cache.core.statistics().dropped_by_cause) - before, blocks);
        CHECK_EQ(cache.core.statistics().nodes, 1u);  // the root of the open context
        CHECK_EQ(cache.core.statistics().evictable_blocks, 0u);
        CHECK_EQ(cache.core.statistics().attention.device.free, 64u);
        CHECK_EQ(cache.core.statistics().attention.host.free, 64u);
        const LeaseId lease = cache.serve({1, 2, 3, 4, 5});
        CHECK_EQ(cache.device_hit + cache.host_hit, 0u);
        CHECK(cache.core.lease(lease).table == range(0, 3));
        cache.release(lease);
    }
}

TEST(a_reset_with_leases_keeps_only_their_blocks) {  // I8
    Cache cache(64, 64);
    for (int round = 0; round < 3; ++round) {
        cache.to_host({1, 2, 3, 4});
        for (const std::int32_t child : {5, 6}) cache.release(cache.serve({8, 9, child, 0, 1}));
        // Two leases share a block; one of them has another path, and one an uncommitted block.
        const LeaseId reader = cache.serve({8, 9, 5, 0, 1, 2, 3});
        const LeaseId other = cache.match({8, 9, 7, 7, 7});
        cache.allocate(other, 5);
        const std::vector<BlockId> table = cache.core.lease(reader).table;
        while (const TransferId save = cache.core.take_backups()) {
            cache.complete(save, Outcome::kDone);
        }
        const std::uint64_t before = total(cache.core.statistics().dropped_by_cause);

        cache.core.reset();
        cache.check();
        CHECK_EQ(total(cache.core.statistics().dropped_by_cause) - before, 6u);
        CHECK_EQ(cache.core.statistics().nodes, 4u);  // a root, and the three blocks of the reader
        CHECK_EQ(cache.core.statistics().attention.device.free, 64u - 4u - 2u);
        CHECK_EQ(cache.core.statistics().attention.host.free, 64u);
        CHECK(cache.core.lease(reader).table == table);
        CHECK_EQ(cache.core.commit(other, 5, 0), 0u);  // nothing of before the reset is cached
        const LeaseId again = cache.match({8, 9, 5, 0, 1});
        CHECK_EQ(cache.device_hit + cache.host_hit, 0u);
        cache.release(again);
        cache.core.reset();  // the leases still have their blocks
        cache.check();
        CHECK(cache.core.lease(reader).table == table);
        cache.release(reader);
        cache.release(other);
        cache.check();
        CHECK_EQ(cache.core.statistics().attention.device.free, 64u);
    }
}

TEST(a_reset_leaves_a_transfer_its_blocks) {  // I8
    Cache cache(8, 8);
    cache.release(cache.serve({1, 2, 3, 4}));
    const TransferId save = cache.core.take_backups();
    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.statistics().attention.host.free, 6u);
    const LeaseId lease = cache.serve({1, 2, 3, 4, 5, 6});
    CHECK_EQ(cache.device_hit, 0u);
    CHECK(cache.core.lease(lease).table == range(2, 5));
    cache.complete(save, Outcome::kDone);
    cache.release(lease);
    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.statistics().attention.device.free, 8u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 8u);
}

TEST(a_detached_block_has_no_children) {
    PrefixTree tree(2, 8, 0);
    std::vector<NodeId> path;
    const std::vector<std::int32_t> tokens{1, 2, 3, 4, 5, 6};
    tree.add_chain(tree.add_root(), tokens.data(), {}, 3, path);
    CHECK_EQ(tree.only_child(path[0]), path[1]);
    tree[path[0]].set(kDetached);
    CHECK_EQ(tree.children(path[0]), 0u);
    CHECK_EQ(tree.only_child(path[1]), path[2]);
    tree.split_after(path[0]);
    CHECK_EQ(tree.children(path[0]), 0u);
}

TEST(reset_frees_the_unused_blocks_of_both_tiers_and_of_unfinished_steps) {  // I8
    Cache cache(64, 64);
    const auto prompt = [](std::int32_t first) {
        std::vector<std::int32_t> tokens(21);
        std::iota(tokens.begin(), tokens.end(), first);
        return tokens;
    };
    cache.to_host(prompt(0));  // its ten blocks are on the host only
    cache.release(cache.serve(prompt(100)));
    cache.complete(cache.core.take_backups(), Outcome::kDone);  // on both
    const LeaseId stepped = cache.serve(prompt(200));           // on the device only
    cache.core.release(stepped, 5);
    std::vector<std::int32_t> fork = prompt(200);
    fork[10] = -1;
    cache.release(cache.serve(fork));
    const LeaseId reader = cache.match({300, 301, 302, 303, 304});
    cache.allocate(reader, 5);
    cache.core.commit(reader, 5, 0);
    cache.release(cache.serve(prompt(300)));  // two of its blocks are leased
    const LeaseId held = cache.serve(prompt(400));
    const TransferId save = cache.core.take_backups();  // pins blocks
    cache.release(held);

    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.statistics().dropped_by_cause.at("reset"), 55u);
    CHECK_EQ(cache.core.statistics().evictable_blocks, 0u);
    CHECK(cache.core.unfinished_step() > 0);
    cache.complete(save, Outcome::kDone);
    cache.release(reader);
    cache.core.finish_step(5);
    cache.check();
    CHECK_EQ(cache.core.statistics().attention.device.free, 64u);
    CHECK_EQ(cache.core.statistics().attention.host.free, 64u);
    cache.release(cache.serve(prompt(100)));
    CHECK_EQ(cache.device_hit + cache.host_hit, 0u);
}

TEST(resize_refuses_blocks_in_use) {
    Cache cache(8);
    const LeaseId id = cache.serve({1, 2, 3, 4});
    CHECK_THROWS(UsageError, (cache.core.resize_device(1), 0));
    cache.core.resize_device(2);
    cache.core.release(id, 5);  // read by step 5, which is not finished
    CHECK_THROWS(UsageError, (cache.core.resize_device(1), 0));
    cache.match({1, 2, 3, 4, 5});
    CHECK_EQ(cache.device_hit, 2u);  // nothing changed
    cache.core.finish_step(5);
    cache.core.resize_device(1);
    cache.check();
    cache.core.resize_device(100);
    CHECK_EQ(cache.core.statistics().attention.device.free, 99u);
}

TEST(resize_succeeds_when_the_last_of_leases_transfers_and_steps_has_ended) {
    Cache cache(16, 16);
    const LeaseId first = cache.serve({1, 2, 3, 4});
    const LeaseId second = cache.serve({5, 6, 7, 8});
    const TransferId backup = cache.core.take_backups();
    const auto resizes = [&] {
        try {
            cache.core.resize_device(2);
            return true;
        } catch (const UsageError&) {
            return false;
        }
    };
    CHECK(!resizes());
    cache.core.release(second, 5);
    CHECK(!resizes());
    cache.core.release(first, 0);
    CHECK(!resizes());
    CHECK(!resizes());
    cache.complete(backup, Outcome::kDone);
    CHECK(!resizes());
    const LeaseId third = cache.serve({9, 10, 11, 12, 13});
    cache.core.finish_step(5);
    CHECK(!resizes());
    cache.release(third);
    while (const TransferId more = cache.core.take_backups()) cache.complete(more, Outcome::kDone);
    CHECK(resizes());
    cache.check();
    CHECK_EQ(cache.core.device_blocks(), 2u);
}

TEST(a_call_begins_a_bounded_number_of_backups_oldest_first) {
    const auto blocks = static_cast<std::uint32_t>(2 * Saver::kMostBackups + 1);
    Cache cache(blocks, blocks);
    std::vector<std::int32_t> tokens(2 * blocks);
    std::iota(tokens.begin(), tokens.end(), 1);
    const LeaseId id = cache.serve(tokens);
    std::vector<BlockId> saved;
    for (const std::size_t expected : {Saver::kMostBackups, Saver::kMostBackups, std::size_t{1}}) {
        const TransferId backup = cache.core.take_backups();
        const auto& copied = cache.core.transfer(backup).device_blocks;
        CHECK_EQ(copied.size(), expected);
        saved.insert(saved.end(), copied.begin(), copied.end());
        CHECK_EQ(cache.core.has_queued_backups(), saved.size() < blocks);
        cache.check();
    }
    CHECK_EQ(cache.core.take_backups(), 0u);
    CHECK(saved == cache.core.lease(id).table);
}

TEST(contexts_share_nothing) {
    Cache cache(8);
    const std::vector<std::int32_t> tokens{1, 2, 3};
    const LeaseId a = cache.core.match(tokens, "a").lease;
    cache.core.allocate(a, 3);
    cache.core.commit(a, 3, 0);
    cache.release(a);
    CHECK_EQ(cache.core.match(tokens, "b").device_blocks, 0u);
    CHECK_EQ(cache.core.match(tokens, "a").device_blocks, 1u);
}

// -- the limit of leases ---------------------------------------------------------------------

TEST(a_refused_match_changes_nothing) {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = 8;
    config.max_leases = 2;
    Core core(config);
    const std::vector<std::int32_t> tokens{1, 2, 3};
    const LeaseId a = core.match(tokens, "a").lease;
    core.match(tokens, "a");
    const std::uint32_t nodes = core.statistics().nodes;
    const Item late{"image", 2, 5};
    CHECK_THROWS(UsageError, core.match(tokens, "b"));
    CHECK_THROWS(UsageError, core.match({}, "c"));
    CHECK_THROWS(UsageError, core.match(tokens, "d", true, true, {&late, 1}));
    CHECK_EQ(core.statistics().nodes, nodes);
    CHECK_EQ(core.statistics().leases, 2u);
    core.release(a, 0);
    CHECK_THROWS(UsageError, core.match(tokens, "d", true, true, {&late, 1}));
    CHECK_EQ(core.statistics().nodes, nodes);
    core.match(tokens, "b");
    CHECK(core.violations().empty());
}

TEST(a_refused_fork_evicts_nothing) {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = 4;
    config.max_leases = 2;
    Core core(config);
    const std::vector<std::int32_t> cached{7, 8, 9};
    const std::vector<std::int32_t> tokens{1, 2, 3};
    const LeaseId old = core.match(cached, "").lease;
    core.allocate(old, 3);
    core.commit(old, 3, 0);
    core.release(old, 0);
    const LeaseId parent = core.match(tokens, "").lease;
    core.allocate(parent, 6);
    core.match(cached, "");
    CHECK_THROWS(UsageError, core.fork(parent, 0));
    CHECK_EQ(core.statistics().attention.device.evicted_blocks(), 0u);
    CHECK_EQ(core.statistics().leases, 2u);
    CHECK(core.violations().empty());
}

TEST(more_than_65535_leases_share_a_block) {
    constexpr std::uint32_t kLeases = 70'000;
    Cache cache(kLeases + 10);
    const LeaseId first = cache.serve({1, 2});
    std::vector<LeaseId> ids;
    const std::vector<std::int32_t> tokens{1, 2, 3};
    for (std::uint32_t i = 0; i < kLeases; ++i) {
        ids.push_back(cache.core.match(tokens, "").lease);
        CHECK(cache.core.allocate(ids.back(), 3) == Grant::kReady);
    }
    cache.check();
    CHECK_EQ(cache.core.statistics().leases, kLeases + 1);
    cache.release(first);
    CHECK_EQ(cache.core.evict_device(1), 0u);
    for (const LeaseId id : ids) cache.core.release(id, 0);
    CHECK_EQ(cache.core.evict_device(kLeases), 1u);
    CHECK_EQ(cache.core.statistics().attention.device.free, kLeases + 10);
}

TEST(lease_ids_are_not_reused) {
    CoreConfig config;
    config.device_blocks = 1;
    Core core(config);
    const std::vector<std::int32_t> tokens{1};
    std::vector<LeaseId> ids;
    for (int i = 0; i < 3000; ++i) ids.push_back(core.match(tokens, "").lease);
    for (const LeaseId id : ids) core.release(id, 0);  // some keep their memory, the rest do not
    std::set<LeaseId> seen(ids.begin(), ids.end());
    for (int i = 0; i < 3000; ++i) CHECK(seen.insert(core.match(tokens, "").lease).second);
    for (const LeaseId id : ids) CHECK_THROWS(LeaseError, core.lease(id));
}

// -- grants in parts -------------------------------------------------------------------------

namespace {

// Grants the first two blocks of a prompt to a lease that only keeps them.
LeaseId hold_two_blocks(Cache& cache) {
    const LeaseId lease = cache.match({1, 2, 3, 4});
    cache.core.compute_nothing(lease, true);
    CHECK(cache.allocate(lease, 4) != Grant::kNone);
    return lease;
}

void end_onloads(Cache& cache, LeaseId lease) {
    for (const TransferId id : std::vector(cache.core.lease(lease).onloads)) {
        cache.complete(id, Outcome::kDone);
    }
}

Grant prolong(Cache& cache, LeaseId lease, const std::vector<std::int32_t>& tokens) {
    const Grant grant = cache.core.prolong(lease, tokens);
    cache.check();
    return grant;
}

}  // namespace

TEST(a_grant_in_parts_has_the_blocks_of_one_grant) {
    Cache cache(8, 8);
    cache.to_host({1, 2, 3, 4, 5, 6, 7, 8});
    const LeaseId whole = cache.match({1, 2, 3, 4, 5, 6, 7, 8});
    cache.core.compute_nothing(whole, true);
    const LeaseId lease = hold_two_blocks(cache);
    CHECK(prolong(cache, lease, {5, 6, 7, 8, 9}) == Grant::kLoading);
    CHECK(cache.allocate(whole, 8) == Grant::kLoading);
    CHECK(cache.table(lease) == cache.table(whole));
    CHECK(cache.core.lease(lease).path == cache.core.lease(whole).path);
    CHECK(cache.core.lease(lease).tokens == cache.core.lease(whole).tokens);
    CHECK_EQ(cache.core.lease(lease).cached_tokens, 8u);
    CHECK(cache.core.lease(lease).onloads == cache.core.lease(whole).onloads);
    end_onloads(cache, lease);
    CHECK(cache.core.is_current(lease));
    CHECK(prolong(cache, lease, {9, 10}) == Grant::kNone);  // not cached
    cache.release(lease);
    cache.release(whole);
}

TEST(evictions_between_the_parts_of_a_grant_shorten_it) {
    Cache cache(8);
    cache.release(cache.serve({1, 2, 3, 4, 5, 6, 7, 8}));
    const LeaseId lease = hold_two_blocks(cache);
    CHECK_EQ(cache.core.evict_device(1), 1u);
    CHECK(prolong(cache, lease, {5, 6, 7, 8}) == Grant::kReady);
    CHECK_EQ(cache.core.lease(lease).cached_tokens, 6u);
    CHECK_EQ(cache.core.evict_device(8), 0u);
    cache.release(cache.serve({1, 2, 3, 4, 5, 6, 9, 10}));
    CHECK(prolong(cache, lease, {7, 8}) == Grant::kNone);
    CHECK(prolong(cache, lease, {9, 10}) == Grant::kReady);
    cache.release(lease);
    CHECK_EQ(cache.core.evict_device(8), 4u);
}

TEST(a_grant_in_parts_ends_where_there_is_no_room_and_after_a_reset) {
    Cache cache(4, 8);
    cache.to_host({1, 2, 3, 4, 5, 6, 7, 8});
    const LeaseId lease = hold_two_blocks(cache);
    const LeaseId other = cache.match({20, 21, 22});
    CHECK(cache.allocate(other, 3) == Grant::kReady);
    const std::vector<BlockId> table = cache.table(lease);
    CHECK(prolong(cache, lease, {5, 6}) == Grant::kNone);
    CHECK(cache.table(lease) == table);
    cache.release(other);
    cache.core.reset();
    CHECK(prolong(cache, lease, {5, 6}) == Grant::kNone);
    end_onloads(cache, lease);
    cache.release(lease);
}

TEST(a_lease_whose_onload_is_being_cancelled_is_not_prolonged_and_keeps_its_blocks) {
    Cache cache(8, 8);
    cache.to_host({1, 2, 3, 4, 5, 6, 7, 8});
    const LeaseId lease = hold_two_blocks(cache);
    const std::vector<NodeId> path = cache.core.lease(lease).path;
    cache.core.mark_cancelling(cache.core.lease(lease).onloads.front());
    CHECK(prolong(cache, lease, {5, 6, 7, 8}) == Grant::kNone);
    CHECK(cache.core.lease(lease).path == path);
    end_onloads(cache, lease);
    CHECK(prolong(cache, lease, {5, 6, 7, 8}) == Grant::kLoading);
    end_onloads(cache, lease);
    cache.release(lease);
}

TEST(a_lease_that_computes_is_not_prolonged) {
    Cache cache(8);
    const LeaseId lease = cache.serve({1, 2, 3, 4});
    const std::vector<std::int32_t> more{5, 6};
    CHECK_THROWS(LeaseError, cache.core.prolong(lease, more));
    CHECK_THROWS(LeaseError, cache.core.prolong(cache.match({1, 2}), more));
    cache.release(lease);
}
