// The components of Core by themselves: the ledger of transfers, contexts and items of the index,
// and the look-ahead of write-backs.
#include <string>
#include <vector>

#include "aiokv/error.hpp"
#include "aiokv/host_copy_list.hpp"
#include "aiokv/index.hpp"
#include "aiokv/look_ahead.hpp"
#include "aiokv/ranked_queue.hpp"
#include "aiokv/transfer_ledger.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

// Returns the child with these tokens, which is added if there is none.
NodeId child(PrefixTree& tree, NodeId parent, const std::int32_t* tokens) {
    std::vector<NodeId> path;
    tree.find_or_add_path(parent, tokens, {}, 1, path);
    return path.front();
}

// Components keep a reference to it.
const CoreConfig kConfig = [] {
    CoreConfig config;
    config.block_tokens = 2;
    config.device_blocks = 8;
    return config;
}();

Transfer onload_of(std::vector<LeaseId> leases) {
    Transfer transfer;
    transfer.leases = std::move(leases);
    return transfer;
}

// A tree of single blocks below one root, all in a queue, first in, first out.
struct Queue {
    explicit Queue(std::int32_t blocks) : tree(16, 64, 0), queue(tree, nullptr) {
        const NodeId root = tree.add_root();
        for (std::int32_t token = 0; token < blocks; ++token) {
            const std::vector<std::int32_t> tokens(16, token);
            nodes.push_back(child(tree, root, tokens.data()));
            queue.push_back(tree.run_of(nodes.back()));
        }
    }

    PrefixTree tree;
    RankedQueue queue;
    LookAhead ahead{tree, queue};
    std::vector<NodeId> nodes;
};

}  // namespace

// -- ledger ----------------------------------------------------------------------------------

TEST(an_onload_is_abandoned_by_its_last_lease) {
    const PrefixTree tree(1, 8, 0);
    TransferLedger ledger(tree);
    const TransferId id = ledger.begin(onload_of({1, 2}));
    ledger.leave(id, 1);
    CHECK(ledger.take_abandoned().empty());
    ledger.leave(id, 2);
    CHECK(ledger.take_abandoned() == std::vector<TransferId>{id});
    CHECK(ledger.take_abandoned().empty());
}

TEST(an_abandoned_onload_that_another_lease_joins_or_that_ends_is_not_reported) {
    const PrefixTree tree(1, 8, 0);
    TransferLedger ledger(tree);
    const TransferId joined = ledger.begin(onload_of({1}));
    const TransferId ended = ledger.begin(onload_of({1}));
    for (const TransferId id : {joined, ended}) ledger.leave(id, 1);
    ledger.join(joined, 2);
    ledger.end(ended);
    CHECK(ledger.take_abandoned().empty());
    CHECK_EQ(ledger.in_flight(), 1u);
    CHECK_EQ(ledger.ended(), 1u);
}

TEST(a_transfer_ends_once) {
    const PrefixTree tree(1, 8, 0);
    TransferLedger ledger(tree);
    const TransferId id = ledger.begin(onload_of({1}));
    CHECK(ledger.end(id).leases == std::vector<LeaseId>{1});
    CHECK_THROWS(InternalError, ledger.end(id));
    CHECK_THROWS(UsageError, ledger.get(id));
}

TEST(a_keeper_takes_over_transfers_tails_and_moves) {
    const PrefixTree tree(1, 8, 0);
    TransferLedger ledger(tree);
    Transfer transfer = onload_of({5, 1});
    transfer.tail_owner = 1;
    const TransferId id = ledger.begin(std::move(transfer));
    const TransferId move = ledger.begin_move({1, {kNoBlock}, {3}, 0});
    ledger.replace_lease(id, 1, 7);
    ledger.replace_lease(move, 1, 7);
    CHECK(ledger.get(id).leases == (std::vector<LeaseId>{5, 7}));
    CHECK_EQ(ledger.get(id).tail_owner, 7u);
    CHECK_EQ(ledger.move(move).lease, 7u);
    ledger.orphan_move(move);
    CHECK_EQ(ledger.move(move).lease, 0u);
    CHECK(ledger.take_abandoned() == std::vector<TransferId>{move});
    CHECK_EQ(ledger.end_move(move).targets[0], 3);
    CHECK_THROWS(UsageError, ledger.move(move));
}

// -- index -----------------------------------------------------------------------------------

TEST(a_context_is_closed_with_its_last_lease_unless_it_has_blocks) {
    LeaseTable leases(8);
    Index index(kConfig, leases);
    const std::uint32_t nodes = index.tree().live_nodes();
    const std::uint32_t salted = index.enter_context("salt");
    CHECK_EQ(index.enter_context("salt"), salted);
    CHECK_EQ(index.tree().live_nodes(), nodes + 1);
    index.leave_context(salted);
    CHECK_EQ(index.tree().live_nodes(), nodes + 1);
    index.leave_context(salted);
    CHECK_EQ(index.tree().live_nodes(), nodes);
    CHECK_EQ(index.enter_context("other"), salted);  // its number is free again
}

TEST(items_are_truncated_and_cleared_with_their_keys) {
    LeaseTable leases(8);
    Index index(kConfig, leases);
    Lease& lease = leases.open(std::vector<std::int32_t>(8, 1), 0, {});
    index.add_items(lease, std::vector<Item>{{"cat", 1, 2}, {"dog", 5, 2}});
    CHECK_EQ(lease.item_keys.size(), 4u);
    index.cut_items(lease, 4);
    CHECK_EQ(lease.items.size(), 1u);
    CHECK_EQ(lease.item_keys.size(), 2u);
    Lease& other = leases.open(lease.tokens, 0, {});
    index.copy_items(lease, other);
    index.forget_items(lease);
    CHECK_EQ(index.tree().item_keys().size(), 2u);
    index.forget_items(other);
    CHECK_EQ(index.tree().item_keys().size(), 0u);
}

// -- look-ahead ------------------------------------------------------------------------------

TEST(host_copies_are_listed_in_the_order_in_which_they_give_way) {
    HostCopyList copies(8);
    const auto nodes = [&] {
        std::vector<NodeId> found;
        for (BlockId host = copies.first(); host != kNoBlock; host = copies.after(host)) {
            found.push_back(copies.node_of(host));
        }
        CHECK_EQ(found.size(), copies.size());
        return found;
    };
    CHECK(copies.empty() && nodes().empty());
    copies.add_last(3, 30);
    copies.add_last(5, 50);
    copies.add_first(1, 10);
    copies.add_first(5, 99);  // is listed
    CHECK(nodes() == std::vector<NodeId>({10, 30, 50}));
    copies.move_to_first(5);
    copies.move_to_first(7);  // is not listed
    CHECK(nodes() == std::vector<NodeId>({50, 10, 30}));
    copies.remove(1);
    copies.remove(7);
    CHECK(nodes() == std::vector<NodeId>({50, 30}));
    copies.remove(3);
    copies.remove(5);
    copies.add_first(3, 31);
    copies.add_last(0, 1);
    CHECK(nodes() == std::vector<NodeId>({31, 1}));
}

TEST(a_look_ahead_continues_after_the_last_node) {
    Queue q(4);
    CHECK(!q.ahead.is_begun());
    for (int i = 0; i < 2; ++i) q.ahead.add(q.ahead.next());
    CHECK_EQ(q.ahead.count(), 2u);
    CHECK_EQ(q.ahead.next(), q.nodes[2]);
}

TEST(a_node_that_leaves_the_queue_is_not_counted) {
    Queue q(4);
    for (int i = 0; i < 3; ++i) q.ahead.add(q.ahead.next());
    q.ahead.remove(
        q.tree.run_of(q.nodes[2]));  // the last one: the walk continues from its position
    q.queue.remove(q.tree.run_of(q.nodes[2]));
    CHECK_EQ(q.ahead.count(), 2u);
    CHECK_EQ(q.ahead.next(), q.nodes[3]);
    q.ahead.remove(q.tree.run_of(q.nodes[0]));
    q.queue.remove(q.tree.run_of(q.nodes[0]));
    q.ahead.remove(q.tree.run_of(q.nodes[3]));  // not looked at
    CHECK_EQ(q.ahead.count(), 1u);
    q.ahead.restart();
    CHECK_EQ(q.ahead.count(), 0u);
    CHECK_EQ(q.ahead.next(), q.nodes[1]);
}
