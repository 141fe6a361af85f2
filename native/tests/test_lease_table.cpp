// LeaseTable: ids, the transitions of a lease's state, and their counts.
#include <set>
#include <string>
#include <utility>

#include "aiokv/error.hpp"
#include "aiokv/lease_table.hpp"
#include "check.hpp"

using namespace aiokv;
using enum LeaseState;

namespace {

constexpr LeaseState kStates[] = {kFree,     kMatched, kGranted,  kFailed,
                                  kSwapping, kSwapped, kReleasing};

const std::set<std::pair<LeaseState, LeaseState>> kAllowed = {
    {kFree, kMatched},   {kMatched, kGranted},  {kMatched, kReleasing}, {kMatched, kFree},
    {kGranted, kFailed}, {kGranted, kSwapping}, {kGranted, kReleasing}, {kGranted, kMatched},
    {kGranted, kFree},   {kFailed, kGranted},   {kFailed, kReleasing},  {kFailed, kMatched},
    {kFailed, kFree},    {kSwapping, kSwapped}, {kSwapping, kGranted},  {kSwapping, kMatched},
    {kSwapping, kFree},  {kSwapped, kGranted},  {kSwapped, kMatched},   {kSwapped, kFree},
    {kReleasing, kFree},
};

// A lease of an empty table, brought to a state by allowed transitions.
Lease& lease_in(LeaseTable& table, LeaseState state) {
    Lease& lease = table.open({}, 0, {});
    if (state == kMatched) return lease;
    if (state == kFree) {
        table.move(lease, kFree);
        return lease;
    }
    table.move(lease, kGranted);
    if (state == kSwapped) table.move(lease, kSwapping);
    if (state != kGranted) table.move(lease, state);
    return lease;
}

}  // namespace

TEST(a_transition_that_is_not_listed_throws_and_changes_nothing) {
    for (const LeaseState from : kStates) {
        for (const LeaseState to : kStates) {
            LeaseTable table(4);
            Lease& lease = lease_in(table, from);
            if (kAllowed.contains({from, to})) {
                table.move(lease, to);
                CHECK(lease.is(to));
                continue;
            }
            CHECK_THROWS(InternalError, table.move(lease, to));
            CHECK(lease.is(from));
            CHECK_EQ(table.count(from), from == kFree ? 0u : 1u);
        }
    }
}

TEST(the_time_with_blocks_is_counted_once_per_grant_of_a_lease_that_computes) {
    const auto count = [](const LeaseTable& table) {
        std::uint64_t sum = 0;
        for (const std::uint64_t n : table.hold_times().counts()) sum += n;
        return sum;
    };
    LeaseTable table(4);
    Lease& lease = lease_in(table, kGranted);
    table.move(lease, kFailed);
    table.move(lease, kGranted);
    table.move(lease, kSwapping);
    CHECK_EQ(count(table), 0u);
    table.move(lease, kSwapped);
    CHECK_EQ(count(table), 1u);
    table.move(lease, kGranted);
    table.move(lease, kReleasing);
    CHECK_EQ(count(table), 1u);
    table.move(lease, kFree);
    CHECK_EQ(count(table), 2u);
    Lease& pin = table.open({}, 0, {true, false, false, false});
    table.move(pin, kGranted);
    table.move(pin, kFree);
    CHECK_EQ(count(table), 2u);
}

TEST(leases_are_counted_by_state) {
    LeaseTable table(8);
    for (const LeaseState state : {kMatched, kGranted, kFailed, kSwapping, kReleasing}) {
        lease_in(table, state);
        CHECK_EQ(table.count(state), 1u);
    }
    CHECK_EQ(table.with_blocks(), 4u);
    CHECK_EQ(table.computing(), 4u);
    CHECK_EQ(table.open_leases(), 4u);  // one has no handle
    Lease& pin = table.open({}, 0, {true, true, false, false});
    table.move(pin, kGranted);
    CHECK_EQ(table.with_blocks(), 5u);
    CHECK_EQ(table.computing(), 4u);
}

TEST(an_id_is_valid_until_its_lease_ends) {
    LeaseTable table(1);
    Lease& lease = table.open({}, 0, {});
    const LeaseId id = lease.id();
    CHECK(table.is_open(id));
    CHECK_THROWS(UsageError, table.require_room());
    table.move(lease, kFree);
    table.close(lease);
    CHECK(!table.is_open(id));
    CHECK_THROWS(LeaseError, table.at(id));
    table.require_room();
    const LeaseId next = table.open({}, 0, {}).id();
    CHECK(next != id);  // the same index, another generation
    CHECK_THROWS(LeaseError, table.at(id));
    CHECK_THROWS(LeaseError, table.at(next + 1));
}

TEST(an_error_names_the_lease_and_has_a_hint) {
    LeaseTable table(1);
    const LeaseId id = table.open({}, 0, {}).id();
    try {
        (void)table.at(id + 1);
    } catch (const LeaseError& error) {
        CHECK_EQ(error.details.lease, id + 1);
    }
    try {
        table.require_room();
    } catch (const UsageError& error) {
        CHECK_EQ(error.details.hint, std::string("release leases"));
    }
}
