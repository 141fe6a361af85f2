#include "aiokv/store_saver.hpp"

#include "report.hpp"

namespace aiokv {

void StoreSaver::note_host_copies(std::span<const NodeId> nodes) {
    if (!stored_.exist()) return;
    for (const NodeId node : nodes) saves_.queue(node);
}

void StoreSaver::note_uses(const Lease& lease, std::size_t resident) {
    if (!stored_.exist() || !lease.flags.computes) return;
    for (std::size_t i = 0; i < lease.path.size(); ++i) {
        Node& n = tree_[lease.path[i]];
        if (i >= resident) n.count_use();
        saves_.note_use(lease.path[i]);
    }
}

void StoreSaver::add_to(GroupStatistics& attention) const {
    const SaveCounts& counts = saves_.counts();
    attention.saved_blocks = counts.saved;
    attention.unsaved_by_cause = {{"dropped", counts.dropped + residency_.evicted_unsaved()},
                                  {"refused", counts.refused},
                                  {"failed", counts.failed}};
}

void StoreSaver::check(Report& report) const {
    saves_.for_each_read([&report](NodeId node) { ++report.holds[node]; });
    saves_.check(report);
}

}  // namespace aiokv
