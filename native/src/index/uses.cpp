#include "aiokv/uses.hpp"

#include <algorithm>
#include <string>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

void Uses::await(Lease& lease) {
    if (!lease.has_blocks()) {
        throw LeaseError("cannot await the use of a lease that is " +
                         std::string(name_of(lease.state)) + "; call allocate first")
            .of(lease.id());
    }
    if (lease.path.empty() || lease.awaited != kNone) return;
    lease.awaited = lease.path.back();
    tree_[lease.awaited].set(kAwaitsUse);
    awaited_.emplace(lease.awaited, lease.id());
}

std::vector<LeaseId> Uses::take() {
    std::vector<LeaseId> used;
    used.swap(used_);
    std::erase_if(used, [this](LeaseId id) {  // skips leases that were released meanwhile
        return !leases_.is_open(id);
    });
    return used;
}

void Uses::note(const Lease& user) {
    if (awaited_.empty() || !user.flags.computes) return;
    for (const NodeId node : user.path) {
        if (!tree_[node].has(kAwaitsUse)) continue;
        const auto [begin, end] = awaited_.equal_range(node);
        for (auto entry = begin; entry != end; ++entry) {
            leases_.at(entry->second).awaited = kNone;
            used_.push_back(entry->second);
        }
        awaited_.erase(node);
        tree_[node].clear(kAwaitsUse);
    }
}

void Uses::forget(Lease& lease) {
    if (lease.awaited == kNone) return;
    const NodeId node = lease.awaited;
    lease.awaited = kNone;
    const LeaseId id = lease.id();
    const auto [begin, end] = awaited_.equal_range(node);
    awaited_.erase(
        std::find_if(begin, end, [id](const auto& entry) { return entry.second == id; }));
    if (!awaited_.contains(node)) tree_[node].clear(kAwaitsUse);
}

void Uses::check(Report& report) const {
    std::size_t awaiting = 0;
    for (const Lease& lease : leases_) {
        if (lease.awaited == kNone) continue;
        ++awaiting;
        report.require(lease.has_blocks() && tree_.is_live(lease.awaited) &&
                           tree_[lease.awaited].has(kAwaitsUse),
                       "I5: node ", lease.awaited, " does not tell a lease of its use");
    }
    report.require(awaiting == awaited_.size(), "I5: ", awaiting, " leases await a use, ",
                   awaited_.size(), " are listed");
}

}  // namespace aiokv
