// Leases that hold a prefix until another lease uses it, such as those of a prefetch.
//
// The last node of the held hit has a flag, so a grant pays only for flagged nodes of its own path.
#include <algorithm>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {

// take_used() will return the lease once a lease that computes was granted a hit of its whole path.
void Core::await_use(LeaseId id) {
    Lease& lease = lease_at(id);
    if (!lease.granted) throw LeaseError("cannot await the use of a lease that is not granted");
    if (lease.path.empty() || lease.awaited != kNone) return;
    lease.awaited = lease.path.back();
    tree_[lease.awaited].set(kAwaitsUse);
    awaited_.emplace(lease.awaited, id);
}

std::vector<LeaseId> Core::take_used() {
    std::vector<LeaseId> used;
    used.swap(used_);
    std::erase_if(used, [this](LeaseId id) {  // released meanwhile
        const Lease& lease = leases_[static_cast<std::uint32_t>(id)];
        return !lease.live || lease.generation != id >> 32;
    });
    return used;
}

// Called when `user` was granted its path.
void Core::note_use(const Lease& user) {
    if (awaited_.empty() || !user.computes) return;
    for (const NodeId node : user.path) {
        if (!tree_[node].has(kAwaitsUse)) continue;
        const auto [begin, end] = awaited_.equal_range(node);
        for (auto entry = begin; entry != end; ++entry) {
            lease_at(entry->second).awaited = kNone;
            used_.push_back(entry->second);
        }
        awaited_.erase(node);
        tree_[node].clear(kAwaitsUse);
    }
}

void Core::forget_use(Lease& lease) {
    if (lease.awaited == kNone) return;
    const NodeId node = lease.awaited;
    lease.awaited = kNone;
    const LeaseId id = (std::uint64_t{lease.generation} << 32) | lease.slot;
    const auto [begin, end] = awaited_.equal_range(node);
    awaited_.erase(
        std::find_if(begin, end, [id](const auto& entry) { return entry.second == id; }));
    if (!awaited_.contains(node)) tree_[node].clear(kAwaitsUse);
}

}  // namespace aiokv
