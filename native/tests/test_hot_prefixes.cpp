// The list of the hottest prefixes, and its bounds.
#include <numeric>

#include "aiokv/core.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

constexpr std::uint32_t kBlockTokens = 2;

CoreConfig config(std::uint32_t device_blocks) {
    CoreConfig config;
    config.block_tokens = kBlockTokens;
    config.device_blocks = device_blocks;
    return config;
}

// A prompt of `blocks` blocks whose tokens count up from `first`, and one token more.
std::vector<std::int32_t> prompt(std::int32_t first, std::size_t blocks) {
    std::vector<std::int32_t> tokens(blocks * kBlockTokens + 1);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

std::vector<std::int32_t> joined(std::vector<std::int32_t> first, std::int32_t second,
                                 std::size_t blocks) {
    first.pop_back();
    const std::vector<std::int32_t> more = prompt(second, blocks);
    first.insert(first.end(), more.begin(), more.end());
    return first;
}

LeaseId serve(Core& core, const std::vector<std::int32_t>& tokens, const char* context = "") {
    const LeaseId id = core.match(tokens, context).lease;
    CHECK(core.allocate(id, static_cast<std::int64_t>(tokens.size())) == Grant::kReady);
    core.commit(id, static_cast<std::int64_t>(tokens.size()), 0);
    return id;
}

void serve_and_release(Core& core, const std::vector<std::int32_t>& tokens) {
    core.release(serve(core, tokens), 0);
}

}  // namespace

TEST(stretches_are_listed_by_use_behind_their_parents) {
    Core core(config(64));
    const std::vector<std::int32_t> system = prompt(0, 3);
    serve_and_release(core, joined(system, 100, 2));
    serve_and_release(core, joined(system, 200, 1));
    serve_and_release(core, joined(system, 200, 1));
    serve(core, prompt(500, 2), "1:a");

    const auto [found, complete] = core.hottest_prefixes(10);
    CHECK(complete);
    CHECK_EQ(found.size(), std::size_t{4});
    CHECK_EQ(found[0].uses, 3u);
    CHECK_EQ(found[0].blocks, 3u);
    CHECK_EQ(found[0].device_blocks, 3u);
    CHECK_EQ(found[0].children, 2u);
    CHECK_EQ(found[0].parent, HotPrefix::kNoParent);
    CHECK_EQ(found[1].uses, 2u);  // the second prompt, twice
    CHECK_EQ(found[1].first_block, 3u);
    CHECK_EQ(found[1].parent, std::size_t{0});
    CHECK_EQ(found[2].uses, 1u);  // a lease holds it
    CHECK_EQ(found[2].refs, 1u);
    CHECK_EQ(found[2].context, std::string_view("1:a"));
    CHECK_EQ(found[3].blocks, 2u);
    CHECK_EQ(found[3].parent, std::size_t{0});
    CHECK_EQ(core.hottest_prefixes(2).prefixes.size(), std::size_t{2});
    CHECK_EQ(core.hottest_prefixes(0).prefixes.size(), std::size_t{0});
}

TEST(a_fork_with_many_children_is_searched_in_part) {
    Core core(config(8192));
    for (std::int32_t i = 0; i < 3000; ++i) serve_and_release(core, prompt(i * 10, 1));
    const auto [found, complete] = core.hottest_prefixes(10);
    CHECK(!complete);
    CHECK_EQ(found.size(), std::size_t{10});
    for (std::int32_t i = 0; i < 3000; ++i) serve_and_release(core, prompt(i * 10, 2));
    CHECK(core.hottest_prefixes(100000).prefixes.size() < 4096);
}

TEST(a_long_stretch_is_cut) {
    Core core(config(8192));
    serve_and_release(core, prompt(0, 6000));
    const auto [found, complete] = core.hottest_prefixes(100);
    CHECK(!complete);
    std::uint32_t blocks = 0;
    for (const HotPrefix& prefix : found) {
        CHECK(prefix.blocks <= 512);
        CHECK_EQ(prefix.first_block, blocks);
        blocks += prefix.blocks;
    }
    CHECK(blocks > 3000 && blocks <= 4096);
}

TEST(the_oldest_leases_are_listed_first) {
    Core core(config(64));
    std::vector<LeaseId> ids;
    for (std::int32_t i = 0; i < 5; ++i) ids.push_back(core.match(prompt(i, 1), "").lease);
    core.release(ids[1], 0);
    const std::vector<const Lease*> listed = core.oldest_leases(3);
    CHECK_EQ(listed.size(), std::size_t{3});
    CHECK_EQ(listed[0]->id(), ids[0]);
    CHECK_EQ(listed[1]->id(), ids[2]);
    CHECK(LeaseTable::age_seconds(*listed[0]) >= 0.0);
    CHECK_EQ(core.oldest_leases(100).size(), std::size_t{4});
}
