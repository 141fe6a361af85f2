// Multimodal items: their keys per block, and matches that end before them.
#include <numeric>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

// Which of the blocks [first, first + count) of 4 tokens an item of this place touches.
std::vector<bool> touched(std::int64_t offset, std::int64_t length, std::size_t count) {
    const Item item{"h", offset, length};
    std::vector<std::string> keys = item_key_bytes({&item, 1}, 4);
    keys.resize(std::max(count, keys.size()));
    std::vector<bool> found;
    for (const std::string& bytes : keys) found.push_back(!bytes.empty());
    return found;
}

// How many items each block of 4 tokens holds: a key is as long as its items are many.
std::vector<std::size_t> item_counts(const std::vector<Item>& items) {
    std::vector<std::size_t> counts;
    for (const std::string& bytes : item_key_bytes(items, 4)) counts.push_back(bytes.size() / 26);
    return counts;
}

// A core of 4-token blocks over a prompt of zeros, as placeholders are.
struct Cache {
    Cache() : core(config()) {}
    ~Cache() { check(); }

    static CoreConfig config() {
        CoreConfig config;
        config.block_tokens = 4;
        config.device_blocks = 32;
        return config;
    }
    Hit match(const std::vector<Item>& items, std::size_t tokens = 21) {
        const std::vector<std::int32_t> prompt(tokens, 0);
        const Hit hit = core.match(prompt, "", true, true, items);
        check();
        return hit;
    }
    std::uint32_t hit(const std::vector<Item>& items, std::size_t tokens = 21) {
        const Hit found = match(items, tokens);
        core.release(found.lease, 0);
        return found.device_blocks;
    }
    LeaseId serve(const std::vector<Item>& items, std::int64_t committed = 21) {
        const LeaseId id = match(items).lease;
        core.allocate(id, 21);
        core.commit(id, committed, 0);
        check();
        return id;
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;
};

}  // namespace

TEST(a_key_belongs_to_the_blocks_an_item_touches) {
    CHECK(item_key_bytes({}, 4).empty());
    CHECK(touched(0, 4, 3) == (std::vector<bool>{true, false, false}));  // ends at a block's start
    CHECK(touched(8, 4, 3) == (std::vector<bool>{false, false, true}));  // begins at one's end
    CHECK(touched(2, 3, 2) == (std::vector<bool>{true, true}));          // spills to the right
    CHECK(touched(3, 6, 3) == (std::vector<bool>{true, true, true}));    // spans the middle one
}

TEST(all_items_of_a_block_are_in_its_key) {
    const std::vector<Item> items{{"h0", 2, 3}, {"h1", 8, 4}, {"h2", 14, 2}};
    CHECK(item_counts(items) == (std::vector<std::size_t>{1, 1, 1, 1}));
    CHECK(item_counts({{"h0", 0, 1}, {"h1", 1, 1}, {"h2", 3, 3}}) ==
          (std::vector<std::size_t>{3, 1}));
}

TEST(keys_differ_by_content_place_and_length) {
    const auto key = [](Item item) { return item_key_bytes({&item, 1}, 4)[0]; };
    CHECK(key({"a", 1, 2}) == key({"a", 1, 2}));
    CHECK(key({"a", 1, 2}) != key({"b", 1, 2}));
    CHECK(key({"a", 1, 2}) != key({"a", 0, 2}));
    CHECK(key({"a", 1, 2}) != key({"a", 1, 3}));
    // the same piece of an item, but another one of it
    const Item late{"a", 0, 12};
    const std::vector<std::string> keys = item_key_bytes({&late, 1}, 4);
    CHECK(keys[0] != keys[1]);
    CHECK(keys[1] != keys[2]);
}

TEST(prompts_part_at_the_first_block_with_another_image) {
    Cache cache;
    cache.core.release(cache.serve({{"cat", 9, 3}}), 0);
    CHECK_EQ(cache.hit({{"cat", 9, 3}}), 5u);
    CHECK_EQ(cache.hit({{"dog", 9, 3}}), 2u);
    CHECK_EQ(cache.hit({{"cat", 8, 3}}), 2u);
    CHECK_EQ(cache.hit({}), 2u);
    cache.core.release(cache.serve({{"dog", 9, 3}}), 0);
    cache.core.release(cache.serve({}), 0);
    CHECK_EQ(cache.hit({{"cat", 9, 3}}), 5u);
    CHECK_EQ(cache.hit({{"dog", 9, 3}}), 5u);
    CHECK_EQ(cache.hit({}), 5u);
    CHECK_EQ(cache.core.statistics().nodes, 1u + 2u + 3u * 3u);  // the root, shared, apart
}

TEST(a_match_never_ends_inside_an_item) {
    Cache cache;
    const std::vector<Item> items{{"a", 2, 3}, {"b", 6, 9}};  // blocks 0-1, blocks 1-3
    cache.core.release(cache.serve(items, 12), 0);            // three blocks; "b" ends in the 4th
    CHECK_EQ(cache.hit(items), 0u);                           // before "b" is inside "a"
    cache.core.release(cache.serve(items), 0);
    CHECK_EQ(cache.hit(items), 5u);
    CHECK_EQ(cache.hit(items, 17), 4u);
    CHECK_EQ(cache.hit(items, 16), 0u);  // the last block is computed, and "b" with it
}

TEST(a_grant_is_cut_as_a_match_is) {
    Cache cache;
    const std::vector<Item> items{{"a", 6, 6}};
    cache.core.release(cache.serve(items), 0);
    const LeaseId id = cache.match(items).lease;
    cache.core.allocate(id, 8);  // two blocks, the second inside "a"
    cache.check();
    CHECK_EQ(cache.core.lease(id).cached_tokens, 4u);
    cache.core.release(id, 0);
}

TEST(pending_blocks_match_equal_items_only) {
    Cache cache;
    const LeaseId owner = cache.serve({{"cat", 9, 3}}, 4);
    const LeaseId same = cache.match({{"cat", 9, 3}}).lease;
    const LeaseId other = cache.match({{"dog", 9, 3}}).lease;
    CHECK_EQ(cache.core.pending(same).blocks, 4u);
    CHECK_EQ(cache.core.pending(other).blocks, 1u);
    for (const LeaseId id : {owner, same, other}) cache.core.release(id, 0);
}

TEST(forks_keep_items_and_eviction_and_reset_clear_them) {
    Cache cache;
    const std::vector<Item> items{{"cat", 9, 3}};
    const LeaseId parent = cache.serve(items, 8);
    const Fork fork = cache.core.fork(parent, 0);
    cache.core.release(parent, 0);
    cache.core.commit(fork.lease, 21, 0);
    cache.check();
    CHECK_EQ(cache.hit(items), 5u);
    CHECK_EQ(cache.hit({}), 2u);
    cache.core.release(fork.lease, 0);
    cache.core.evict_device(3);
    cache.check();
    CHECK_EQ(cache.hit(items), 2u);
    const LeaseId kept = cache.serve(items);
    cache.core.reset();
    cache.check();
    cache.core.release(kept, 0);
    CHECK_EQ(cache.core.statistics().nodes, 1u);  // the root
}

TEST(impossible_items_are_refused) {
    Cache cache;
    for (const std::vector<Item>& items : {
             std::vector<Item>{{"a", -1, 2}},
             {{"a", 0, 0}},
             {{"a", 20, 2}},
             {{"", 0, 2}},
             {{"a", 0, 3}, {"b", 2, 2}},
             {{"a", 4, 2}, {"b", 0, 2}},
             {{"a", 1, std::numeric_limits<std::int64_t>::max()}},
         }) {
        CHECK_THROWS(UsageError, cache.match(items));
    }
    CHECK_EQ(cache.core.statistics().leases, 0u);
}

TEST(a_key_without_the_items_from_a_position_on) {
    const std::vector<Item> both{{"long hash", 0, 2}, {"b", 3, 5}};
    const std::vector<Item> first{{"long hash", 0, 2}};
    const std::string key = item_key_bytes(both, 4)[0];
    CHECK(item_key_before(key, 4) == key);
    CHECK(item_key_before(key, 3) == item_key_bytes(first, 4)[0]);
    CHECK(item_key_before(key, 2) == item_key_bytes(first, 4)[0]);
    CHECK(item_key_before(key, 0).empty());
    const Item early{"c", 2, 4};  // begins in the block before
    CHECK(!item_key_before(item_key_bytes({&early, 1}, 4)[1], 2).empty());
}

TEST(truncation_in_front_of_an_item_removes_it) {
    Cache cache;
    const std::vector<Item> items{{"a", 1, 2}, {"b", 6, 2}, {"c", 12, 4}};
    const std::vector<Item> front{{"a", 1, 2}};
    const LeaseId id = cache.serve(items, 4);  // the first block is shared
    cache.core.truncate(id, 5, 0);             // the second is cut in front of "b"
    cache.check();
    CHECK_EQ(cache.core.lease(id).items.size(), 1u);
    cache.core.extend({&id, 1}, 16);
    const std::vector<std::int32_t> text(16, 0);
    cache.core.append(id, text);
    cache.core.commit(id, 21, 0);
    cache.core.release(id, 0);
    CHECK_EQ(cache.hit(items), 1u);
    CHECK_EQ(cache.hit(front), 5u);
    CHECK_EQ(cache.core.statistics().nodes, 6u);
}

TEST(truncation_behind_an_item_in_the_same_block_keeps_it) {
    Cache cache;
    const std::vector<Item> items{{"a", 4, 2}, {"b", 7, 4}};
    const std::vector<Item> kept{{"a", 4, 2}};
    const LeaseId id = cache.serve(items, 4);
    cache.core.truncate(id, 6, 0);
    cache.check();
    cache.core.extend({&id, 1}, 15);
    cache.core.append(id, std::vector<std::int32_t>(15, 0));
    cache.core.commit(id, 21, 0);
    cache.core.release(id, 0);
    CHECK_EQ(cache.hit(items), 1u);
    CHECK_EQ(cache.hit(kept), 5u);
}

TEST(truncation_inside_an_item_is_refused) {
    Cache cache;
    const std::vector<Item> items{{"a", 6, 6}};
    const LeaseId id = cache.serve(items, 4);
    for (const std::int64_t tokens : {7, 8, 11}) {
        CHECK_THROWS(LeaseError, (cache.core.truncate(id, tokens, 0), 0));
        CHECK_EQ(cache.core.lease(id).num_tokens, 21u);
        CHECK_EQ(cache.core.lease(id).tokens.size(), 21u);
    }
    cache.core.truncate(id, 12, 0);
    CHECK_EQ(cache.core.lease(id).items.size(), 1u);
    cache.core.truncate(id, 6, 0);
    CHECK(cache.core.lease(id).items.empty());
    CHECK(cache.core.lease(id).item_keys.empty());
    cache.core.release(id, 0);
}

TEST(truncation_of_a_parent_keeps_the_items_of_its_fork) {
    Cache cache;
    const std::vector<Item> items{{"a", 8, 4}};
    const LeaseId parent = cache.serve(items, 8);
    const LeaseId child = cache.core.fork(parent, 0).lease;
    cache.core.truncate(parent, 8, 0);
    cache.check();
    CHECK(cache.core.lease(parent).item_keys.empty());
    CHECK_EQ(cache.core.lease(child).item_keys.size(), 3u);
    cache.core.commit(child, 21, 0);
    cache.core.release(parent, 0);
    cache.core.release(child, 0);
    CHECK_EQ(cache.hit(items), 5u);
    CHECK_EQ(cache.hit({}), 2u);
}

TEST(items_of_later_tokens_are_those_of_one_prompt) {
    Cache cache;
    const std::vector<Item> all{{"h0", 2, 3}, {"h1", 6, 3}, {"h2", 9, 6}};
    const std::vector<std::int32_t> zeros(21, 0);
    const LeaseId id =
        cache.core.match(std::span(zeros).first(6), "", true, true, {all.data(), 1}).lease;
    cache.core.allocate(id, 21);
    cache.core.append(id, std::span(zeros).first(3), std::span(all).subspan(1, 1));
    cache.core.append(id, std::span(zeros).first(12), std::span(all).subspan(2, 1));
    cache.core.commit(id, 21, 0);
    cache.check();
    CHECK_EQ(cache.hit(all), 5u);
    CHECK_EQ(cache.hit({{"h0", 2, 3}, {"h1", 6, 3}, {"hx", 9, 6}}), 0u);
    cache.core.release(id, 0);
    cache.check();
}
