// The eviction queue, the reuse model and the duel, without a cache around them.
#include <vector>

#include "aiokv/duel.hpp"
#include "aiokv/eviction_queue.hpp"
#include "aiokv/prefix_tree.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

constexpr std::uint32_t kBlockTokens = 512;

struct Forest {
    PrefixTree tree{1, 64, 0};
    NodeId root = tree.add_root();

    NodeId add(std::int32_t token, std::uint32_t reuse_class = 0) {
        const NodeId node = tree.find_or_add_child(root, &token).node;
        tree[node].reuse_class = static_cast<ReuseClass>(reuse_class);
        return node;
    }
};

using Queue = EvictionQueue<PrefixTree>;

std::vector<NodeId> drain(Queue& queue) {
    std::vector<NodeId> order;
    for (NodeId node; (node = queue.front()) != kNone;) {
        order.push_back(node);
        queue.remove(node);
    }
    return order;
}

std::vector<ReuseClass> ask(ReuseModel& model, std::int32_t document, std::size_t blocks) {
    std::vector<std::int32_t> tokens(blocks * kBlockTokens, document);
    std::vector<ReuseClass> classes;
    model.observe(tokens, 1, classes);
    return classes;
}

}  // namespace

TEST(lru_is_the_order_of_use) {
    Forest f;
    Queue queue(f.tree, nullptr);
    const NodeId a = f.add(1, 3), b = f.add(2, 0), c = f.add(3, 7);
    for (const NodeId node : {a, b, c}) queue.push_back(node);
    queue.remove(a);
    queue.push_back(a);
    queue.remove(c);
    queue.push_front(c);
    CHECK_EQ(queue.after(c), b);
    CHECK_EQ(queue.after(a), kNone);
    CHECK(drain(queue) == (std::vector<NodeId>{c, b, a}));
    CHECK_EQ(queue.size(), 0u);
}

TEST(runs_lose_no_node_while_they_age_and_the_order_changes) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    Queue queue(f.tree, &model);
    std::vector<NodeId> nodes;
    for (std::int32_t i = 0; i < 200; ++i) {
        nodes.push_back(f.add(i, static_cast<std::uint32_t>(i) % ReuseFeatures::kClasses));
        queue.push_back(nodes.back());
        if (i % 3 == 0) queue.remove(nodes[static_cast<std::size_t>(i)]);
        ask(model, i % 20, 40);
        queue.choose(i / 40 % 2 == 1);
    }
    std::uint32_t ahead = 0;
    for (NodeId node = queue.front(); node != kNone; node = queue.after(node)) ++ahead;
    CHECK_EQ(ahead, queue.size());
    const std::vector<NodeId> order = drain(queue);
    CHECK_EQ(order.size(), std::size_t{200 - 67});
    CHECK_EQ(queue.size(), 0u);
}

TEST(what_was_blocked_goes_before_all_runs) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    Queue queue(f.tree, &model);
    const NodeId a = f.add(1, 0), b = f.add(2, 23);
    queue.push_back(a);
    queue.push_front(b);
    CHECK(drain(queue) == (std::vector<NodeId>{b, a}));
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
    Queue queue(f.tree, &model);
    std::vector<NodeId> nodes;
    for (std::int32_t i = 0; i < 60; ++i) {
        nodes.push_back(f.add(i, static_cast<std::uint32_t>(i * 7) % 11));
        queue.push_back(nodes.back());
        ask(model, i, 9);
        queue.choose(i < 40);
    }
    CHECK(drain(queue) == nodes);
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
    Queue queue(f.tree, &model);
    const NodeId a = f.add(1, returns), b = f.add(2, once), c = f.add(3, returns);
    for (const NodeId node : {a, b, c}) queue.push_back(node);
    queue.choose(true);
    CHECK_EQ(queue.front(), b);
    CHECK_EQ(queue.after(b), a);
    CHECK(drain(queue) == (std::vector<NodeId>{b, a, c}));
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
    Duel small(model, 100), large(model, 1000);
    for (std::int32_t i = 0; i < 4000; ++i) {
        std::vector<ReuseClass> classes = ask(model, i % 30, 10);
        small.observe(classes);
        large.observe(classes);
    }
    CHECK(small.prefers_score());
    CHECK(!large.prefers_score());
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
