// The eviction queue and the reuse model, without a cache around them.
#include <vector>

#include "aiokv/eviction_queue.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

constexpr std::uint32_t kBlockTokens = 512;

struct Forest {
    PrefixTree tree{1, 64, 0};
    NodeId root = tree.add_root();

    NodeId add(std::int32_t token, std::uint32_t reuse_class = 0) {
        const NodeId node = tree.find_or_add_child(root, &token).node;
        tree[node].reuse_class = reuse_class & 127;
        return node;
    }
};

std::vector<NodeId> drain(EvictionQueue& queue) {
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
    EvictionQueue queue(f.tree, 8, nullptr);
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

TEST(segments_lose_no_node_while_they_age_and_merge) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    EvictionQueue queue(f.tree, 64, &model);
    std::vector<NodeId> nodes;
    for (std::int32_t i = 0; i < 200; ++i) {
        nodes.push_back(f.add(i, static_cast<std::uint32_t>(i) % ReuseFeatures::kClasses));
        queue.push_back(nodes.back());
        if (i % 3 == 0) queue.remove(nodes[static_cast<std::size_t>(i)]);
        ask(model, i % 20, 40);
        queue.refresh();
    }
    std::uint32_t ahead = 0;
    for (NodeId node = queue.front(); node != kNone; node = queue.after(node)) ++ahead;
    CHECK_EQ(ahead, queue.size());
    const std::vector<NodeId> order = drain(queue);
    CHECK_EQ(order.size(), std::size_t{200 - 67});
    CHECK_EQ(queue.size(), 0u);
}

TEST(blocked_nodes_are_evicted_before_all_segments) {
    Forest f;
    ReuseModel model(kBlockTokens, 64);
    EvictionQueue queue(f.tree, 64, &model);
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

TEST(a_loop_larger_than_the_cache_predicts_a_gain_over_lru) {
    ReuseModel model(kBlockTokens, 100);
    for (std::int32_t i = 0; i < 4000; ++i) ask(model, i % 30, 10);
    CHECK(model.is_warm());
    CHECK(model.predicted_gain(100) > 0.03);
    CHECK(model.predicted_gain(1000) < 0.03);
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
