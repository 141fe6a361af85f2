// Fetches from the stores and saves to them; I1-I6 after every step.
#include <algorithm>
#include <string>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "aiokv/reuse_sketch.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

using Prompt = std::vector<std::int32_t>;

CoreConfig config_of(std::uint32_t device_blocks, std::uint32_t host_blocks,
                     SavePolicy write_policy = SavePolicy::kWriteThrough) {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = device_blocks;
    config.host_blocks = host_blocks;
    config.write_policy = write_policy;
    config.stores.exist = true;
    return config;
}

class Cache {
  public:
    explicit Cache(const CoreConfig& config) : core(config) {}
    Cache(std::uint32_t device_blocks, std::uint32_t host_blocks)
        : Cache(config_of(device_blocks, host_blocks)) {}
    ~Cache() { check(); }

    LeaseId match(const Prompt& tokens, std::span<const Item> items = {}) {
        return core.match(tokens, "salt", true, true, items).lease;
    }
    LeaseId computed(const Prompt& tokens) {
        const LeaseId id = match(tokens);
        const auto length = static_cast<std::int64_t>(tokens.size());
        CHECK(core.allocate(id, length) == Grant::kReady);
        core.commit(id, length, 0);
        check();
        return id;
    }
    // In host memory and on the device.
    LeaseId backed_up(const Prompt& tokens) {
        const LeaseId id = computed(tokens);
        complete(core.take_backups());
        return id;
    }
    TransferId fetch(LeaseId id, std::size_t blocks = 99, TransferId replaced = 0) {
        const TransferId fetch = core.begin_fetch(id, blocks, replaced);
        check();
        return fetch;
    }
    TransferId save() {
        const TransferId save = core.take_saves();
        check();
        return save;
    }
    void complete(TransferId id, Outcome outcome = Outcome::kDone, std::uint32_t first_bad = 0,
                  const std::vector<std::uint8_t>& results = {}) {
        core.complete(id, outcome, first_bad, results);
        check();
    }
    // Of a new lease: (device, host) blocks.
    std::pair<std::uint32_t, std::uint32_t> hit(const Prompt& tokens) {
        const Hit hit = core.match(tokens, "salt");
        core.release(hit.lease, 0);
        return {hit.device_blocks, hit.host_blocks};
    }
    void check() const {
        for (const std::string& line : core.violations()) check::fail("violations", 0, line);
    }

    Core core;
};

using Blocks = std::pair<std::uint32_t, std::uint32_t>;

const Prompt kPrompt{1, 2, 3, 4, 5, 6, 7, 8, 9};  // four full blocks that can be hit

}  // namespace

TEST(digests_are_those_of_the_documented_encoding) {
    // digest = bytearray(hashlib.sha256(b"aiokv root 2\0" + struct.pack("<II", 2, 4) +
    // b"salt").digest()) digest[16:21] = hashlib.sha256(b"aiokv salt 1\0").digest()[:5]: this
    // context names no salt
    const Digest root = root_digest(2, "salt");
    std::string text;
    for (const std::uint8_t byte : root) {
        constexpr const char* kDigits = "0123456789abcdef";
        text += {kDigits[byte >> 4], kDigits[byte & 15]};
    }
    CHECK_EQ(text, std::string("54fdf8287d8dbae1ef04a41a8bf8cb7ad7f7ecc2fd0ad19c0c68d0578ffd2dd4"));
}

TEST(missing_blocks_have_the_digests_that_saves_have) {
    Cache cache(8, 8);
    const Missing missing = cache.core.missing(cache.match(kPrompt));
    CHECK_EQ(missing.first_block, 0u);
    CHECK_EQ(missing.digests.size(), 4u);
    cache.backed_up(kPrompt);
    const StoreTransfer& save = cache.core.store_transfer(cache.save());
    CHECK(std::ranges::equal(save.digests, missing.digests));
    CHECK_EQ(cache.core.missing(cache.match(kPrompt)).first_block, 4u);
    CHECK(cache.core.missing(cache.match(kPrompt)).digests.empty());
}

TEST(saves_tell_which_blocks_are_consecutive) {
    Cache cache(16, 16);
    cache.backed_up(kPrompt);
    cache.backed_up({9, 9, 9, 9});
    cache.backed_up({1, 2, 3, 4, 7, 7});  // a branch of the first prompt
    const StoreTransfer& save = cache.core.store_transfer(cache.save());
    CHECK(save.follows == std::vector<std::uint8_t>({0, 1, 1, 1, 0, 1, 0}));
}

TEST(missing_digests_follow_what_is_cached) {
    Cache cache(config_of(8, 8, SavePolicy::kNone));  // evicts without a save
    const LeaseId id = cache.match(kPrompt);
    const auto digests_of = [&](LeaseId lease) {
        const Missing missing = cache.core.missing(lease);
        return std::pair(missing.first_block,
                         std::vector(missing.digests.begin(), missing.digests.end()));
    };
    const auto [none, all] = digests_of(id);
    const LeaseId other = cache.computed({1, 2, 3, 4});
    const LeaseId late = cache.match(kPrompt);
    CHECK(digests_of(id) == std::pair(std::size_t{2}, std::vector(all.begin() + 2, all.end())));
    CHECK(digests_of(late) == digests_of(id));
    cache.core.release(other, 0);
    CHECK_EQ(cache.core.evict_device(8), 2u);
    CHECK(digests_of(late) == std::pair(none, all));
    CHECK(digests_of(id) == std::pair(none, all));
    CHECK(cache.core.allocate(id, 9) == Grant::kReady);
    CHECK(cache.core.missing(id).digests.empty());
    cache.core.truncate(id, 3, 0);
    const Prompt more{9, 9, 9, 9, 9};
    cache.core.extend({&id, 1}, 5);
    cache.core.append(id, more);
    cache.core.retract(id, 0);
    CHECK(digests_of(id) == digests_of(cache.match({1, 2, 3, 9, 9, 9, 9, 9})));
    cache.core.compute_nothing(late, true);
    CHECK(digests_of(late) == std::pair(none, all));
    const LeaseId whole = cache.match({1, 2, 3, 4, 5, 6, 7, 8});
    CHECK_EQ(digests_of(whole).second.size(), 3u);
    cache.core.compute_nothing(whole, true);
    CHECK(digests_of(whole) == std::pair(none, all));
}

TEST(long_prompts_are_fetched_in_parts) {
    constexpr std::size_t kPart = Fetches::kMostMissing;
    constexpr std::size_t kBlocks = 2 * kPart + 5;
    const auto parts_of = [](std::uint32_t block_tokens, std::size_t blocks) {
        CoreConfig config = config_of(8, kBlocks);
        config.block_tokens = block_tokens;
        Cache cache(config);
        Prompt prompt(blocks * block_tokens + 1);
        for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<std::int32_t>(i);
        const LeaseId id = cache.match(prompt);
        std::vector<std::size_t> parts;
        Digest parent = root_digest(block_tokens, "salt");
        for (std::size_t block = 0; block < blocks;) {
            const Missing missing = cache.core.missing(id);
            CHECK_EQ(missing.first_block, block);
            for (const Digest& digest : missing.digests) {
                parent = block_digest(
                    parent, Tokens(prompt).subspan(block++ * block_tokens, block_tokens), {});
                CHECK(digest == parent);
            }
            parts.push_back(missing.digests.size());
            cache.complete(cache.fetch(id, blocks));
        }
        CHECK(cache.core.missing(id).digests.empty());
        CHECK_EQ(cache.core.evict_host(1), 1u);
        CHECK_EQ(cache.core.missing(id).digests.size(), 1u);
        CHECK_EQ(cache.core.missing(cache.match(prompt)).digests.size(), 1u);
        CHECK(cache.core.missing(cache.match(prompt)).digests.front() == parent);
        CHECK_EQ(cache.core.evict_host(kBlocks), blocks - 1);
        CHECK_EQ(cache.core.missing(id).digests.size(), parts.front());
        return parts;
    };
    CHECK(parts_of(2, kBlocks) == std::vector<std::size_t>({kPart, kPart, 5}));
    CHECK(parts_of(16, kPart + 1) == std::vector<std::size_t>({kPart, 1}));
    CHECK(parts_of(64, kPart / 4 + 1) == std::vector<std::size_t>({kPart / 4, 1}));
    CHECK(parts_of(64 * kPart, 2) == std::vector<std::size_t>({1, 1}));
}

TEST(a_fetch_inserts_the_proven_prefix_only_at_its_end) {
    Cache cache(8, 8);
    const LeaseId lease = cache.match(kPrompt);
    const TransferId fetch = cache.fetch(lease, 3);
    CHECK_EQ(cache.core.store_transfer(fetch).host_blocks.size(), 3u);
    CHECK_EQ(cache.core.statistics().attention.host.in_flight, 3u);
    CHECK(cache.hit(kPrompt) == Blocks(0, 0));
    cache.core.release(lease, 0);  // the fetch goes on
    cache.complete(fetch, Outcome::kFailed, 2);
    CHECK(cache.hit(kPrompt) == Blocks(0, 2));
    CHECK_EQ(cache.core.statistics().attention.host.free, 6u);
    CHECK_EQ(cache.core.statistics().attention.fetched_blocks, 2u);
    CHECK_EQ(cache.core.statistics().attention.unfetched_blocks, 1u);
    CHECK_EQ(cache.core.evict_host(9), 2u);
}

TEST(a_cancelled_fetch_leaves_nothing) {
    Cache cache(8, 8);
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    cache.complete(fetch, Outcome::kCancelled, 4);
    CHECK(cache.hit(kPrompt) == Blocks(0, 0));
    CHECK_EQ(cache.core.statistics().attention.host.free, 8u);
    CHECK_THROWS(InternalError, cache.core.complete(fetch, Outcome::kDone, 0));
}

TEST(leases_join_the_fetch_of_their_next_block) {
    Cache cache(8, 8);
    const TransferId fetch = cache.fetch(cache.match(kPrompt), 2);
    CHECK_EQ(cache.fetch(cache.match(kPrompt)), fetch);
    const Prompt other{1, 2, 9, 9, 9, 9, 9};
    const LeaseId diverging = cache.match(other);
    CHECK_EQ(cache.fetch(diverging), fetch);  // for the common part
    cache.complete(fetch);
    const TransferId rest = cache.fetch(diverging);
    CHECK(rest != 0 && rest != fetch);
    CHECK_EQ(cache.core.store_transfer(rest).host_blocks.size(), 2u);
    cache.complete(rest);
    CHECK(cache.hit(other) == Blocks(0, 3));
}

TEST(a_fetch_ends_before_a_block_that_another_fetch_brings) {
    Cache cache(config_of(8, 8, SavePolicy::kNone));  // evicts without a save
    const LeaseId first = cache.computed({1, 2});
    const TransferId deep = cache.fetch(cache.match(kPrompt));
    CHECK_EQ(cache.core.store_transfer(deep).host_blocks.size(), 3u);
    cache.core.release(first, 0);
    CHECK_EQ(cache.core.evict_device(1), 1u);  // what the fetch continues is lost
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    CHECK_EQ(cache.core.store_transfer(fetch).host_blocks.size(), 1u);
    cache.complete(deep);
    cache.complete(fetch);
    CHECK(cache.hit(kPrompt) == Blocks(0, 1));
}

TEST(a_late_fetch_is_replaced_and_joined_no_more) {
    for (const bool late_ends_first : {true, false}) {
        Cache cache(8, 8);
        const LeaseId lease = cache.match(kPrompt);
        const TransferId late = cache.fetch(lease, 2);
        const TransferId fetch = cache.fetch(lease, 4, late);
        CHECK(fetch != late && fetch != 0);
        const std::vector<BlockId> taken = cache.core.store_transfer(late).host_blocks;
        const std::vector<BlockId> other = cache.core.store_transfer(fetch).host_blocks;
        CHECK(std::ranges::find_first_of(taken, other) == taken.end());  // each has its own blocks
        CHECK_EQ(cache.fetch(cache.match(kPrompt)), fetch);
        cache.complete(late_ends_first ? late : fetch);
        if (late_ends_first) CHECK_EQ(cache.fetch(cache.match({1, 2, 3, 4, 5, 6, 0})), fetch);
        cache.complete(late_ends_first ? fetch : late);
        CHECK(cache.hit(kPrompt) == Blocks(0, 4));
        CHECK_EQ(cache.core.statistics().attention.host.free, 4u);
    }
}

TEST(a_late_fetch_is_replaced_in_part) {
    Cache cache(8, 8);
    const LeaseId lease = cache.match(kPrompt);
    const TransferId late = cache.fetch(lease, 4);
    const TransferId fetch = cache.fetch(lease, 1, late);
    CHECK_EQ(cache.fetch(cache.match(kPrompt)), fetch);
    cache.complete(fetch);
    CHECK_EQ(cache.fetch(cache.match(kPrompt)), late);
    cache.complete(late, Outcome::kFailed, 0);
    CHECK(cache.hit(kPrompt) == Blocks(0, 1));
    CHECK(cache.fetch(lease, 99, late) != 0);  // it has ended: there is nothing to be replaced
}

TEST(the_first_proof_of_a_block_wins) {
    Cache cache(8, 8);
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    const LeaseId lease = cache.backed_up({1, 2, 3, 4});  // two blocks with host copies
    cache.computed({1, 2, 3, 4, 5, 6});                   // and one on the device only
    const std::uint32_t free = cache.core.statistics().attention.host.free;
    cache.complete(fetch);
    CHECK_EQ(cache.core.statistics().attention.host.free, free + 2);
    CHECK(cache.hit(kPrompt) == Blocks(3, 1));
    cache.core.release(lease, 0);
    CHECK_EQ(cache.save(), 0u);  // the stores have them
}

TEST(a_reset_detaches_fetches_and_saves) {
    Cache cache(8, 12);
    cache.backed_up({1, 2, 3, 4});
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    const TransferId other = cache.fetch(cache.match({7, 7, 7}));
    const TransferId save = cache.save();
    const std::uint32_t free = cache.core.statistics().attention.host.free;
    cache.core.reset();
    cache.check();
    CHECK_EQ(cache.core.statistics().attention.host.free, free);  // those of the save, too
    cache.complete(save);
    CHECK_EQ(cache.core.statistics().attention.host.free, free + 2);
    cache.complete(other);
    cache.complete(fetch);
    CHECK_EQ(cache.core.statistics().attention.host.free, 12u);
    CHECK(cache.hit({7, 7, 7}) == Blocks(0, 0));
}

TEST(a_tier_is_not_forgotten_while_a_fetch_or_a_save_is_in_flight) {
    Cache cache(8, 8);
    const LeaseId lease = cache.match(kPrompt);
    const TransferId fetch = cache.fetch(lease);
    CHECK_THROWS(UsageError, cache.core.forget_host());
    cache.complete(fetch);
    cache.core.forget_host();
    cache.core.release(cache.backed_up(kPrompt), 0);
    const TransferId save = cache.save();
    CHECK_THROWS(UsageError, cache.core.forget_host());
    CHECK_THROWS(UsageError, cache.core.forget_device());
    cache.complete(save);
    cache.core.forget_device();
    cache.core.forget_host();
    CHECK_EQ(cache.core.statistics().nodes, 2u);  // two contexts
}

TEST(host_room_for_a_fetch_is_made_without_blocks_in_use) {
    Cache cache(8, 3);
    const LeaseId first = cache.backed_up({1, 2});
    cache.core.release(cache.backed_up({9, 9}), 0);
    const TransferId save = cache.save();  // reads both host copies
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    CHECK_EQ(cache.core.store_transfer(fetch).host_blocks.size(), 1u);
    CHECK_EQ(cache.fetch(cache.match({8, 8, 8})), 0u);
    cache.complete(save);
    const TransferId other = cache.fetch(cache.match({8, 8, 8}));
    CHECK_EQ(cache.core.store_transfer(other).host_blocks.size(), 1u);
    cache.complete(other);
    cache.complete(fetch);
    cache.core.release(first, 0);
}

TEST(a_fetch_never_evicts_the_path_that_it_continues) {
    Cache cache(8, 2);
    cache.core.release(cache.backed_up({1, 2}), 0);
    CHECK_EQ(cache.core.evict_device(8), 1u);
    const TransferId fetch = cache.fetch(cache.match(kPrompt));
    CHECK_EQ(cache.core.store_transfer(fetch).host_blocks.size(), 1u);
    cache.core.evict_host(9);
    cache.complete(fetch);
    CHECK(cache.hit(kPrompt) == Blocks(0, 2));
}

TEST(a_fetched_block_counts_for_the_first_lease_that_computes_with_it) {
    Cache cache(8, 8);
    cache.complete(cache.fetch(cache.match(kPrompt), 2));
    const LeaseId pin = cache.match(kPrompt);
    cache.core.compute_nothing(pin);
    CHECK(cache.core.allocate(pin, 4) == Grant::kLoading);
    CHECK_EQ(cache.core.usage(pin).cached_store_tokens, 0u);
    const LeaseId lease = cache.match(kPrompt);
    CHECK(cache.core.allocate(lease, 9) == Grant::kLoading);
    CHECK_EQ(cache.core.usage(lease).cached_store_tokens, 4u);
    const LeaseId later = cache.match(kPrompt);
    CHECK(cache.core.allocate(later, 9) != Grant::kNone);
    CHECK_EQ(cache.core.usage(later).cached_store_tokens, 0u);
    CHECK_EQ(cache.core.statistics().hit_store_tokens, 4u);
    cache.complete(cache.core.lease(lease).onloads[0], Outcome::kFailed, 1);
    CHECK_EQ(cache.core.usage(lease).cached_store_tokens, 2u);  // it failed on the way up
}

TEST(items_set_fetched_blocks_apart) {
    Cache cache(8, 8);
    const std::vector<Item> cat{{"cat", 2, 3}};
    const std::vector<Item> dog{{"dog", 2, 3}};
    const TransferId fetch = cache.fetch(cache.match(kPrompt, cat));
    CHECK(cache.fetch(cache.match(kPrompt, dog), 1) == fetch);  // the first block has no item
    cache.complete(fetch);
    CHECK_EQ(cache.core.match(kPrompt, "salt", true, true, cat).host_blocks, 4u);
    CHECK_EQ(cache.core.match(kPrompt, "salt", true, true, dog).host_blocks, 1u);
    CHECK_EQ(cache.core.match(kPrompt, "salt").host_blocks, 1u);
    CHECK(cache.core.missing(cache.match(kPrompt, cat)).digests.empty());
    const Missing other = cache.core.missing(cache.match(kPrompt, dog));
    CHECK_EQ(other.first_block, 1u);
    const Missing plain = cache.core.missing(cache.match(kPrompt));
    CHECK(!std::ranges::equal(other.digests, plain.digests));
}

TEST(a_saved_block_is_known_after_its_host_copy_was_lost) {
    Cache cache(8, 2);
    cache.backed_up({1, 2, 3, 4});
    cache.complete(cache.save());
    const LeaseId other = cache.match({8, 8, 8, 8, 8});
    cache.complete(cache.fetch(other), Outcome::kCancelled);  // reclaims both host copies
    CHECK_EQ(cache.core.statistics().reclaimed_host_copies, 2u);
    const LeaseId again = cache.match({1, 2, 3, 4, 5});
    CHECK(cache.core.allocate(again, 5) == Grant::kReady);
    cache.complete(cache.core.take_backups());
    CHECK_EQ(cache.save(), 0u);
    CHECK_EQ(cache.core.statistics().attention.saved_blocks, 2u);
}

TEST(blocks_that_stores_wait_for_replace_host_copies_that_wait_for_no_save) {
    Cache cache(8, 2);
    cache.backed_up({1, 2, 3, 4});
    cache.computed({5, 6, 7, 8});
    CHECK_EQ(cache.core.take_backups(), 0u);
    cache.complete(cache.save());
    cache.computed({9, 9, 8, 8});
    const TransferId backup = cache.core.take_backups();
    CHECK_EQ(cache.core.transfer(backup).nodes.size(), 2u);
    CHECK_EQ(cache.core.statistics().reclaimed_host_copies, 2u);
    CHECK_EQ(cache.core.statistics().skipped_backups, 0u);
    cache.complete(backup);
}

TEST(early_copies_that_stores_wait_for_come_first) {
    CoreConfig config = config_of(8, 1);
    config.stores.policy = SavePolicy::kNthUse;
    config.stores.uses = 2;
    Cache cache(config);
    cache.computed({7, 8});
    cache.computed({1, 2});
    cache.computed({1, 2, 3});  // the second use
    cache.complete(cache.core.take_backups());
    CHECK_EQ(cache.core.store_transfer(cache.save()).host_blocks.size(), 1u);
    CHECK_EQ(cache.core.statistics().attention.offloaded_blocks, 1u);
}

TEST(refused_and_failed_blocks_are_saved_after_their_next_use) {
    Cache cache(8, 8);
    cache.backed_up({1, 2, 3, 4, 5, 6});
    const TransferId save = cache.save();
    CHECK_THROWS(UsageError,
                 cache.core.complete(save, Outcome::kDone, 0, std::vector<std::uint8_t>{0}));
    cache.complete(save, Outcome::kFailed, 0, {0, 3, 4});
    CHECK_EQ(cache.core.statistics().attention.saved_blocks, 1u);
    CHECK_EQ(cache.core.statistics().attention.unsaved_by_cause.at("refused"), 1u);
    CHECK_EQ(cache.core.statistics().attention.unsaved_by_cause.at("failed"), 1u);
    CHECK_EQ(cache.save(), 0u);
    CHECK(cache.core.allocate(cache.match({1, 2, 3, 4, 5, 6, 7}), 7) == Grant::kReady);
    CHECK_EQ(cache.core.store_transfer(cache.save()).host_blocks.size(), 2u);
}

TEST(a_save_does_not_keep_a_block_on_the_device) {
    Cache cache(2, 4);
    cache.core.release(cache.backed_up({1, 2, 3, 4}), 0);
    const TransferId save = cache.save();
    CHECK_EQ(cache.core.evict_device(9), 2u);
    CHECK_EQ(cache.core.evict_host(9), 0u);
    cache.complete(save);
    CHECK_EQ(cache.core.evict_host(9), 2u);
}

TEST(saves_wait_for_the_nth_use) {
    CoreConfig config = config_of(4, 4);
    config.stores.policy = SavePolicy::kNthUse;
    config.stores.uses = 3;
    Cache cache(config);
    const Prompt prompt{1, 2, 3};
    cache.core.release(cache.backed_up(prompt), 0);
    CHECK(!cache.core.wants_saves());
    const LeaseId second = cache.match(prompt);
    CHECK(cache.core.allocate(second, 3) == Grant::kReady);
    cache.core.release(second, 0);
    CHECK(!cache.core.wants_saves());
    CHECK_EQ(cache.core.evict_device(9), 1u);
    const LeaseId third = cache.match(prompt);  // a use in host memory
    CHECK(cache.core.allocate(third, 3) == Grant::kLoading);
    CHECK(cache.core.wants_saves());
    CHECK_EQ(cache.core.store_transfer(cache.save()).host_blocks.size(), 1u);
}

TEST(blocks_near_host_eviction_are_saved_ahead) {
    CoreConfig config = config_of(8, 4);
    config.stores.policy = SavePolicy::kWriteBack;
    config.stores.ahead_blocks = 2;
    Cache cache(config);
    cache.core.release(cache.backed_up({1, 2, 3, 4}), 0);
    CHECK(!cache.core.wants_saves());  // two host blocks are free
    cache.core.release(cache.backed_up({7, 7, 8, 8}), 0);
    CHECK_EQ(cache.save(), 0u);  // none is on the host alone
    CHECK_EQ(cache.core.evict_device(2), 2u);
    const TransferId save = cache.save();
    CHECK_EQ(cache.core.store_transfer(save).host_blocks.size(), 2u);
    cache.complete(save);
    CHECK_EQ(cache.save(), 0u);
    CHECK_EQ(cache.core.evict_host(2), 2u);
    CHECK_EQ(cache.core.statistics().attention.unsaved_by_cause.at("dropped"), 0u);
    CHECK_EQ(cache.core.evict_device(9), 2u);
    CHECK_EQ(cache.core.evict_host(9), 2u);  // before they were saved
    CHECK_EQ(cache.core.statistics().attention.unsaved_by_cause.at("dropped"), 2u);
}

TEST(the_queue_of_saves_is_bounded) {
    CoreConfig config = config_of(8, 8);
    config.stores.queue_blocks = 3;
    Cache cache(config);
    cache.backed_up({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
    CHECK_EQ(cache.core.statistics().attention.unsaved_by_cause.at("dropped"), 2u);
    CHECK_EQ(cache.core.store_transfer(cache.save()).host_blocks.size(), 3u);
    CHECK(!cache.core.wants_saves());
}

TEST(few_saves_are_in_flight_at_a_time) {
    Cache cache(32, 32);
    std::vector<TransferId> saves;
    for (std::int32_t token = 0; token < 6; ++token) {
        cache.backed_up({token, token});
        saves.push_back(cache.save());
    }
    CHECK_EQ(std::count(saves.begin(), saves.end(), 0u), 2);
    cache.complete(saves[0]);
    CHECK_EQ(cache.core.store_transfer(cache.save()).host_blocks.size(), 2u);
}

TEST(a_sketch_remembers_a_period_and_forgets_after_two) {
    const auto digest_of = [](std::uint32_t number) { return root_digest(number, "sketch"); };
    ReuseSketch sketch(1000);
    CHECK(!sketch.offer(digest_of(0)));
    CHECK(sketch.offer(digest_of(0)));
    std::uint32_t wrong = 0;
    for (std::uint32_t number = 1; number < 1900; ++number)
        wrong += sketch.offer(digest_of(number));
    CHECK(wrong < 60);  // 3 %
    std::uint32_t known = 0;
    for (std::uint32_t number = 1000; number < 1900; ++number) {
        known += sketch.offer(digest_of(number));
    }
    CHECK_EQ(known, 900u);
    for (std::uint32_t number = 5000; number < 9000; ++number) sketch.offer(digest_of(number));
    known = 0;
    for (std::uint32_t number = 1; number < 900; ++number) known += sketch.offer(digest_of(number));
    CHECK(known < 40);
}

TEST(a_sketch_counts_offers_up_to_its_most) {
    ReuseSketch sketch(1000, 3);
    for (const std::uint32_t before : {0u, 1u, 2u, 3u, 3u}) {
        CHECK_EQ(sketch.count(root_digest(7, "sketch")), before);
    }
    CHECK_EQ(sketch.count(root_digest(8, "sketch")), 0u);
}

TEST(without_stores_there_are_no_digests) {
    CoreConfig config = config_of(8, 8);
    config.stores.exist = false;
    Cache cache(config);
    cache.backed_up(kPrompt);
    CHECK_EQ(cache.save(), 0u);
    CHECK_EQ(cache.fetch(cache.match({7, 7, 7})), 0u);
    CHECK(cache.core.missing(cache.match({7, 7, 7})).digests.empty());
}

TEST(models_with_recurrent_state_use_no_stores) {
    CoreConfig config = config_of(8, 8);
    config.state_slots = 4;
    Cache cache(config);
    CHECK_EQ(cache.fetch(cache.match(kPrompt)), 0u);
    CHECK(cache.core.missing(cache.match(kPrompt)).digests.empty());
}
