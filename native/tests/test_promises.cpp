// Promises, compared with a walk over all leases.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/promises.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

constexpr std::size_t kBlock = 2;

bool same_block(const Lease& a, const Lease& b, std::size_t block) {
    const auto key = [block](const Lease& lease) {
        return block < lease.item_keys.size() ? lease.item_keys[block] : kNoItems;
    };
    return std::equal(&a.tokens[block * kBlock], &a.tokens[block * kBlock] + kBlock,
                      &b.tokens[block * kBlock]) &&
           key(a) == key(b);
}

std::uint32_t common(const Lease& a, const Lease& b, std::size_t first, std::size_t limit) {
    std::size_t block = first;
    while (block < std::min(limit, a.tokens.size() / kBlock) && same_block(a, b, block)) ++block;
    return static_cast<std::uint32_t>(block - first);
}

// Prompts of few different blocks, so that many begin alike; frontiers at three depths.
class Prompts {
  public:
    explicit Prompts(std::size_t count) {
        for (std::uint32_t slot = 0; slot < count; ++slot) {
            Lease& lease = leases.emplace_back();
            lease.index = slot;
            lease.generation = 1;
            write(lease);
        }
    }

    void write(Lease& lease) {
        lease.tokens.clear();
        for (std::size_t n = random() % 20; n > 0; --n) {
            lease.tokens.push_back(random() % 3 == 0 ? static_cast<int>(random() % 3) : 1);
        }
        lease.item_keys.assign(random() % 4, kNoItems);
        for (ItemKey& key : lease.item_keys) key = static_cast<ItemKey>(random() % 2);
        lease.path.assign(random() % 3, 0);
        lease.frontier = static_cast<NodeId>(10 * lease.path.size() + random() % 2);
    }

    std::mt19937 random{7};
    std::deque<Lease> leases;
};

// Adds and removes at random and compares every answer; returns the owners that were named.
std::vector<LeaseId> walk() {
    Prompts prompts(60);
    Promises promises(prompts.leases, kBlock);
    std::set<std::uint32_t> promised;
    std::vector<LeaseId> owners;
    for (int step = 0; step < 5000; ++step) {
        Lease& lease = prompts.leases[prompts.random() % prompts.leases.size()];
        promises.remove(lease);
        promised.erase(lease.index);
        prompts.write(lease);
        if (prompts.random() % 3 != 0) {
            promises.add(lease);
            promised.insert(lease.index);
        }
        const Lease& asks = prompts.leases[prompts.random() % prompts.leases.size()];
        const std::size_t first = asks.path.size();
        const std::size_t limit = asks.tokens.size() / kBlock;
        std::uint32_t most = 0;
        for (const std::uint32_t slot : promised) {
            const Lease& owner = prompts.leases[slot];
            if (owner.frontier == asks.frontier) {
                most = std::max(most, common(owner, asks, first, limit));
            }
        }
        const Pending found = promises.find(asks.frontier, asks, first, limit);
        CHECK_EQ(found.blocks, most);
        CHECK_EQ(found.owner != 0, most > 0);
        if (found.owner != 0) {
            const auto slot = static_cast<std::uint32_t>(found.owner);
            CHECK(promised.contains(slot));
            CHECK_EQ(common(prompts.leases[slot], asks, first, limit), most);
        }
        owners.push_back(found.owner);
        CHECK(promises.runs() <= 2 * promised.size());
    }
    for (const Lease& lease : prompts.leases) promises.remove(lease);
    CHECK(promises.empty());
    return owners;
}

}  // namespace

TEST(longest_promise_equals_a_walk_over_all_leases) {
    walk();
}

TEST(equal_calls_name_equal_owners) {  // I9
    CHECK(walk() == walk());
}

TEST(equal_promises_share_their_runs) {
    Prompts prompts(1000);
    Promises promises(prompts.leases, kBlock);
    for (Lease& lease : prompts.leases) {
        lease.tokens.assign(100, 5);
        lease.item_keys.clear();
        lease.path.clear();
        lease.frontier = 3;
        promises.add(lease);
    }
    CHECK_EQ(promises.runs(), 1u);
    const Pending found = promises.find(3, prompts.leases[999], 0, 50);
    CHECK_EQ(found.blocks, 50u);
    CHECK_EQ(static_cast<std::uint32_t>(found.owner), 0u);  // the oldest one
    promises.remove(prompts.leases[0]);
    CHECK_EQ(static_cast<std::uint32_t>(promises.find(3, prompts.leases[999], 0, 50).owner), 1u);
    promises.clear();
    CHECK(promises.empty());
    promises.remove(prompts.leases[1]);  // nothing is left of it
    promises.add(prompts.leases[1]);
    CHECK_EQ(promises.runs(), 1u);
}
