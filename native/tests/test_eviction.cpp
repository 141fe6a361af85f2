// The eviction queue, the reuse model and set dueling, without a cache around them.
#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/evictable_blocks.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/reuse_labels.hpp"
#include "aiokv/set_dueling.hpp"
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

constexpr std::uint32_t kBlockTokens = 512;

struct Forest {
    PrefixTree tree{1, 64, 0};
    NodeId root = tree.add_root();

    // A run of one block.
    RunId add(std::int32_t token, std::uint32_t reuse_class = 0) {
        const NodeId node = child(tree, root, &token);
        tree.classify({&node, 1}, static_cast<ReuseClass>(reuse_class));
        return tree.run_of(node);
    }
};

using Queue = EvictionQueue<Slab<Run>>;

std::vector<RunId> drain(Queue& queue) {
    std::vector<RunId> order;
    for (RunId run; (run = queue.front()) != kNoRun;) {
        order.push_back(run);
        queue.remove(run);
    }
    return order;
}

// Prompts in each of which the scores hit `gain` more, until the test changes the order.
int prompts_until_change(LeadTest& test, double gain, double floor) {
    const bool before = test.prefers_score();
    int prompts = 0;
    for (; test.prefers_score() == before && prompts < 1000; ++prompts) test.add(gain, floor);
    return prompts;
}

std::vector<ReuseClass> ask(ReuseModel& model, std::int32_t document, std::size_t blocks) {
    std::vector<std::int32_t> tokens(blocks * kBlockTokens, document);
    std::vector<ReuseClass> classes;
    model.observe(tokens, 1, classes);
    return classes;
}

// Defers a run of four blocks, and returns it. Returns the blocks of the queue, in eviction order,
// as indices of the run; 4 is another block, which was queued before.
std::vector<std::size_t> order_after_return(std::uint32_t host_blocks) {
    CoreConfig config;
    config.eviction = "lru";
    config.host_blocks = host_blocks;
    PrefixTree tree{1, 64, 0};
    const NodeId root = tree.add_root();
    EvictableBlocks blocks(config, tree);
    const std::vector<std::int32_t> tokens{1, 2, 3, 4, 5};
    std::vector<NodeId> nodes;
    tree.add_chain(root, tokens.data(), {}, 4, nodes);
    tree.add_chain(root, &tokens[4], {}, 1, nodes);
    for (const NodeId node : nodes) tree[node].set(kDeviceValid);
    const RunId run = tree.run_of(nodes[0]);
    blocks.enqueue(tree.run_of(nodes[4]));
    blocks.enqueue(run);
    blocks.defer(run);
    CHECK(blocks.is_deferred(nodes[0]));
    blocks.requeue_if_free(nodes[3]);
    CHECK_EQ(blocks.evictable_device(), 5u);
    Report report(0, 0, tree.end_id());
    blocks.check(report);
    CHECK(report.take().empty());
    std::vector<std::size_t> order;
    for (NodeId node = blocks.device_front(); node != kNone; node = blocks.after_on_device(node)) {
        order.push_back(static_cast<std::size_t>(std::ranges::find(nodes, node) - nodes.begin()));
    }
    return order;
}

}  // namespace

TEST(lru_is_the_order_of_use) {
    Forest f;
    Queue queue(f.tree.runs(), nullptr);
    const RunId a = f.add(1, 3), b = f.add(2, 0), c = f.add(3, 7);
    for (const RunId run : {a, b, c}) queue.push_back(run);
    queue.remove(a);
    queue.push_back(a);
    queue.remove(c);
    queue.push_front(c);
    CHECK_EQ(queue.after(c), b);
    CHECK_EQ(queue.after(a), kNoRun);
    CHECK(drain(queue) == (std::vector<RunId>{c, b, a}));
    CHECK_EQ(queue.size(), 0u);
}

TEST(cohorts_lose_no_run_while_they_age_and_the_order_changes) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    Queue queue(f.tree.runs(), &model);
    std::vector<RunId> runs;
    for (std::int32_t i = 0; i < 200; ++i) {
        runs.push_back(f.add(i, static_cast<std::uint32_t>(i) % ReuseFeatures::kClasses));
        queue.push_back(runs.back());
        if (i % 3 == 0) queue.remove(runs[static_cast<std::size_t>(i)]);
        ask(model, i % 20, 40);
        queue.choose(i / 40 % 2 == 1 ? EvictionRank::kScore : EvictionRank::kRecency);
    }
    std::uint32_t ahead = 0;
    for (RunId run = queue.front(); run != kNoRun; run = queue.after(run)) ++ahead;
    CHECK_EQ(ahead, queue.size());
    const std::vector<RunId> order = drain(queue);
    CHECK_EQ(order.size(), std::size_t{200 - 67});
    CHECK_EQ(queue.size(), 0u);
}

TEST(what_was_blocked_goes_before_all_cohorts) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    Queue queue(f.tree.runs(), &model);
    const RunId a = f.add(1, 0), b = f.add(2, 23);
    queue.push_back(a);
    queue.push_front(b);
    CHECK(drain(queue) == (std::vector<RunId>{b, a}));
}

TEST(parts_of_a_run_wait_where_it_waited) {
    Forest f;
    Queue queue(f.tree.runs(), nullptr);
    const RunId a = f.add(1), b = f.add(2), c = f.add(3), d = f.add(4);
    queue.push_back(b);
    queue.insert_before(a, b);
    queue.insert_after(d, b);
    queue.insert_before(c, d);
    CHECK_EQ(queue.before(a), kNoRun);
    CHECK_EQ(queue.before(d), c);
    CHECK(drain(queue) == (std::vector<RunId>{a, b, c, d}));
}

TEST(a_deferred_run_returns_whole_without_a_host_tier) {
    CHECK(order_after_return(0) == (std::vector<std::size_t>{3, 2, 1, 0, 4}));
    // With a host tier, those above may have to be saved first.
    CHECK(order_after_return(4) == (std::vector<std::size_t>{3, 4}));
}

TEST(a_prompt_that_returns_changes_its_class) {
    ReuseModel model(kBlockTokens, 1000);
    const std::vector<ReuseClass> first = ask(model, 7, 4);
    const std::vector<ReuseClass> again = ask(model, 7, 4);
    CHECK_EQ(first.size(), std::size_t{5});  // four stretches and what follows them
    CHECK_EQ(first[0], (ReuseFeatures{0, 1, 0}.reuse_class()));  // once, 3 to 32 stretches added
    CHECK_EQ(again[0], (ReuseFeatures{1, 0, 1}.reuse_class()));  // twice, nothing added, soon
}

TEST(eviction_by_recency_ignores_classes_and_times) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    Queue queue(f.tree.runs(), &model);
    std::vector<RunId> runs;
    for (std::int32_t i = 0; i < 60; ++i) {
        runs.push_back(f.add(i, static_cast<std::uint32_t>(i * 7) % 11));
        queue.push_back(runs.back());
        ask(model, i, 9);
        queue.choose(i < 40 ? EvictionRank::kScore : EvictionRank::kRecency);
    }
    CHECK(drain(queue) == runs);
}

TEST(eviction_by_score_takes_first_what_returns_least) {
    Forest f;
    ReuseModel model(kBlockTokens, 400);
    // Document 7 returns; the others are asked for once.
    ReuseClass returns = 0, once = 0;
    for (std::int32_t i = 0; i < 4000; ++i) {
        once = ask(model, 1000 + i, 10)[5];
        returns = ask(model, 7, 10)[5];
    }
    CHECK(returns != once);
    Queue queue(f.tree.runs(), &model);
    const RunId a = f.add(1, returns), b = f.add(2, once), c = f.add(3, returns);
    for (const RunId run : {a, b, c}) queue.push_back(run);
    queue.choose(EvictionRank::kScore);
    CHECK_EQ(queue.front(), b);
    CHECK_EQ(queue.after(b), a);
    CHECK(drain(queue) == (std::vector<RunId>{b, a, c}));
}

TEST(labels_that_tell_what_returns_decide_the_order_until_they_are_wrong) {
    ReuseModel model(kBlockTokens, 400);
    SetDueling dueling(model, 400);
    ReuseLabels labels;
    std::vector<ReuseClass> classes;
    // Every prompt is like the others, but for its label: one in four comes again once, after the
    // rest of the capacity was used twice.
    std::int32_t next = 0;
    const auto serve = [&](std::int32_t document, std::string_view label) {
        const std::vector<std::int32_t> tokens(10 * kBlockTokens, document);
        model.observe(tokens, 1, classes);
        dueling.observe(classes);
        model.label(tokens, 1, labels.id_of(label), classes);
        dueling.label(classes);
    };
    const auto run = [&](int rounds, bool is_true) {
        for (int i = 0; i < rounds; ++i, ++next) {
            const bool returns = next % 4 == 0;
            serve(next, returns == is_true ? "returns" : "ends");
            if (next >= 80 && next % 4 == 0) serve(next - 80, is_true ? "ends" : "returns");
        }
    };
    CHECK(!model.has_labels());
    run(3000, true);
    CHECK(model.has_labels());
    CHECK(dueling.preferred() == EvictionRank::kLabelledScore);
    const ReuseClass some = ReuseFeatures{0, 1, 0}.reuse_class();
    const ReuseClass keep = ReuseFeatures::with_label(some, labels.id_of("returns"));
    const ReuseClass drop = ReuseFeatures::with_label(some, labels.id_of("ends"));
    CHECK(model.score(keep, 8, true) > 2 * model.score(drop, 8, true));
    CHECK_EQ(model.score(keep, 8), model.score(drop, 8));
    run(400, false);
    CHECK(dueling.preferred() != EvictionRank::kLabelledScore);
}

TEST(labels_beyond_the_limit_share_one_number) {
    ReuseLabels labels;
    std::uint32_t last = 0;
    for (int i = 0; i < 100; ++i) last = labels.id_of("label " + std::to_string(i));
    CHECK_EQ(last, ReuseFeatures::kLabels - 1);
    CHECK_EQ(labels.id_of("label 99"), labels.id_of("label 14"));
    CHECK_EQ(labels.id_of("label 0"), 1u);
    CHECK_EQ(labels.id_of("label 13"), 14u);
}

TEST(a_shadow_cache_by_recency_holds_the_stretches_used_last) {
    ShadowCache cache(4, nullptr);
    const std::vector<ReuseClass> classes(3, 0);
    const std::vector<std::uint64_t> a{1, 2}, b{3, 4}, c{5};
    CHECK_EQ(cache.use(a, classes), 0u);
    CHECK_EQ(cache.use(b, classes), 0u);
    CHECK_EQ(cache.use(a, classes), 2u);
    CHECK_EQ(cache.use(c, classes), 0u);  // in the place of 4
    CHECK_EQ(cache.use(b, classes), 1u);
    CHECK_EQ(cache.use(a, classes), 1u);
}

TEST(equal_keys_in_one_prompt_do_no_harm_to_a_shadow_cache) {
    ShadowCache cache(4, nullptr);
    const std::vector<ReuseClass> classes(3, 0);
    const std::vector<std::uint64_t> a{1, 1, 1}, b{1, 2, 3};
    for (int i = 0; i < 20; ++i) {
        CHECK(cache.use(a, classes) <= 3);
        CHECK(cache.use(b, classes) <= 3);
    }
}

TEST(the_scores_are_preferred_in_a_loop_larger_than_the_cache) {
    ReuseModel model(kBlockTokens, 100);
    SetDueling small(model, 100), large(model, 1000);
    for (std::int32_t i = 0; i < 4000; ++i) {
        std::vector<ReuseClass> classes = ask(model, i % 30, 10);
        small.observe(classes);
        large.observe(classes);
    }
    CHECK(small.preferred() == EvictionRank::kScore);
    CHECK(large.preferred() == EvictionRank::kRecency);
}

TEST(a_few_prompts_do_not_change_the_order_however_large_they_are) {
    for (const double gain : {1.0, 1e6}) {
        LeadTest test;
        CHECK_EQ(prompts_until_change(test, gain, 0.5), 10);  // more than 3 * 3
        CHECK_EQ(prompts_until_change(test, -gain, 0.5), 5);  // more than 2 * 2
    }
}

TEST(a_lead_below_the_cost_of_a_change_does_not_change_the_order) {
    LeadTest test;
    CHECK_EQ(prompts_until_change(test, 1, 100), 101);
    CHECK_EQ(prompts_until_change(test, -1, 100), 101);
}

TEST(one_unlucky_prompt_is_outweighed_by_many_small_gains) {
    LeadTest test;
    prompts_until_change(test, 1, 10);
    test.add(-1000, 10);
    for (int i = 0; i < 5000; ++i) {
        test.add(1, 10);
        CHECK(test.prefers_score());
    }
}

TEST(an_unlucky_stretch_does_not_delay_the_next_changes) {
    LeadTest test;
    const int first = prompts_until_change(test, 2, 20);
    prompts_until_change(test, -500, 20);
    for (int i = 0; i < 50; ++i) {
        CHECK_EQ(prompts_until_change(test, 2, 20), first);
        prompts_until_change(test, -500, 20);
    }
}

TEST(scores_that_turn_wrong_whenever_they_are_followed_lose_less_than_they_had_led_by) {
    constexpr double kFloor = 8;
    LeadTest test;
    double lead = 0, loss = 0;
    for (int i = 0; i < 10000; ++i) {
        (test.prefers_score() ? loss : lead) += 1;
        test.add(test.prefers_score() ? -1 : 1, kFloor);
        CHECK(loss <= lead);
    }
    CHECK(loss > 4000);
    for (int i = 0; i < 10000; ++i) {  // scores that are always wrong cost one lead
        loss += test.prefers_score();
        test.add(-1, kFloor);
    }
    CHECK(loss <= lead + kFloor + 1);
}

TEST(tokens_behind_the_last_full_stretch_count_by_the_share_that_they_fill) {
    constexpr std::uint32_t kSmall = 16;
    ReuseModel model(kSmall, 64);
    std::vector<ReuseClass> classes;
    for (const std::uint32_t rest : {0u, 1u, 128u, 384u, 511u}) {
        double counted = 0;
        for (std::int32_t i = 0; i < 2000; ++i) {
            const std::vector<std::int32_t> tokens(512 + rest, i);
            model.observe(tokens, 1, classes);
            const std::size_t stretches = model.keys().size();
            CHECK(stretches == 1 || stretches == 2);
            CHECK(stretches <= classes.size());
            counted += static_cast<double>(stretches) - 1;
            model.observe(tokens, 1, classes);
            CHECK_EQ(model.keys().size(), stretches);  // equal prompts have equal stretches
        }
        CHECK(std::abs(counted / 2000 - rest / 512.0) < 0.05);
    }
}

TEST(a_prompt_that_differs_in_any_one_token_is_new_to_the_model) {
    for (const std::uint32_t block_tokens : {kBlockTokens, kBlockTokens + 1}) {
        const std::uint32_t last = block_tokens - 1;
        for (const std::uint32_t position : {0u, 1u, 2u, 255u, last - 1, last}) {
            ReuseModel model(block_tokens, 64);
            std::vector<std::int32_t> tokens(block_tokens, 7);
            std::vector<ReuseClass> first, again, other;
            model.observe(tokens, 1, first);
            model.observe(tokens, 1, again);
            tokens[position] = 8;
            model.observe(tokens, 1, other);
            CHECK(first != again);
            CHECK(first == other);
        }
    }
}
