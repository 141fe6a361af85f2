#include "aiokv/auxiliary_stores.hpp"

#include <algorithm>

namespace aiokv {

AuxiliaryStores::AuxiliaryStores(AuxiliaryGroups& groups, const Matching& matching)
    : groups_(groups), matching_(matching) {
    for (BlockGroup* group : groups.all()) {
        if (group->store() != nullptr) stores_.push_back(group->store());
    }
}

AuxiliaryStore* AuxiliaryStores::find(TransferId id) const {
    const auto found = std::find_if(stores_.begin(), stores_.end(),
                                    [id](const AuxiliaryStore* store) { return store->has(id); });
    return found == stores_.end() ? nullptr : *found;
}

AuxiliaryStore* AuxiliaryStores::of_group(GroupId group) const {
    const auto found =
        std::find_if(stores_.begin(), stores_.end(),
                     [group](const AuxiliaryStore* store) { return store->group() == group; });
    return found == stores_.end() ? nullptr : *found;
}

bool AuxiliaryStores::wants_saves() const {
    return std::any_of(stores_.begin(), stores_.end(),
                       [](const AuxiliaryStore* store) { return store->wants_saves(); });
}

TransferId AuxiliaryStores::take() {
    for (AuxiliaryStore* store : stores_) {
        if (const TransferId id = store->take(); id != 0) return id;
    }
    return 0;
}

std::vector<std::uint8_t> AuxiliaryStores::has_copies(Lease& lease, GroupId group,
                                                      std::size_t first, std::size_t end) const {
    std::vector<std::uint8_t> found;
    const AuxiliaryStore* store = of_group(group);
    if (store == nullptr || !lease.is(LeaseState::kMatched)) return found;
    end = std::min(end, matching_.frontier(lease).first);
    for (const NodeId node : matching_.nodes(lease, first, end)) {
        found.push_back(store->has_copy(node));
    }
    return found;
}

TransferId AuxiliaryStores::begin_fetch(Lease& lease, GroupId group, std::size_t blocks) {
    AuxiliaryStore* store = of_group(group);
    if (store == nullptr || !lease.is(LeaseState::kMatched) || blocks == 0) return 0;
    if (blocks > matching_.frontier(lease).first) return 0;
    groups_.touch_hit(lease.path);
    const std::size_t tail = blocks - std::min<std::size_t>(blocks, store->tail_blocks());
    const std::size_t head = std::min<std::size_t>(tail, store->head_blocks());
    std::vector<NodeId> needed = matching_.nodes(lease, 0, head);
    const std::vector<NodeId> last = matching_.nodes(lease, tail, blocks);
    needed.insert(needed.end(), last.begin(), last.end());
    return store->begin_fetch(needed);
}

void AuxiliaryStores::complete(TransferId id, Outcome outcome, std::uint32_t first_bad,
                               std::span<const std::uint8_t> results) {
    find(id)->complete(id, outcome, first_bad, results);
}

}  // namespace aiokv
