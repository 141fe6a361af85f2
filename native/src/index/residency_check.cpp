#include "aiokv/residency.hpp"
#include "report.hpp"

namespace aiokv {

void Residency::add_to(CoreStatistics& statistics) const {
    GroupStatistics& attention = statistics.attention;
    attention.device.blocks = device_.capacity();
    attention.device.free = device_.free_blocks();
    attention.device.cached = device_nodes_;
    attention.device.evicted_by_cause = evicted_device_.by_name();
    attention.host.blocks = host_.capacity();
    attention.host.free = host_.free_blocks();
    attention.host.evicted_by_cause = evicted_host_.by_name();
    attention.onloaded_blocks = onloaded_;
    attention.offloaded_blocks = offloaded_;
    statistics.evictable_blocks = evictable();
    statistics.dropped_by_cause = dropped_.by_name();
    statistics.failed_blocks = failed_;
    statistics.reclaimed_host_copies = reclaimed_host_copies_;
    statistics.index_bytes += device_.bytes() + host_.bytes() + evictable_.bytes();
}

void Residency::check(Report& report) const {
    std::uint32_t device_nodes = 0;
    std::uint32_t held_nodes = 0;
    std::uint32_t clean = 0;
    for (NodeId node = 0; node < tree_.end_id(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node)) continue;
        held_nodes += n.holds > 0;
        if (n.has(kRoot)) continue;
        if (n.device != kNoBlock) report.device.own(n.device, "a node");
        if (n.host != kNoBlock) report.host.own(n.host, "a node");
        report.require(n.has(kDeviceValid) || !tree_.run(node).has(kOnDevice), "I4: node ", node,
                       " is not on the device, its run is");
        const std::uint32_t refs = tree_.refs(node);
        report.require(refs == report.refs[node], "I5: node ", node, " counts ", refs, " refs of ",
                       report.refs[node]);
        const auto more = more_holds_.find(node);
        const std::uint32_t held = n.holds + (more == more_holds_.end() ? 0 : more->second);
        report.require(held == report.holds[node], "I5: node ", node, " counts ", held,
                       " holds of ", report.holds[node]);
        report.require(n.pins == report.pins[node], "I3: node ", node, " counts ", n.pins + 0,
                       " pins of ", report.pins[node]);
        device_nodes += n.device != kNoBlock;
        const bool is_clean = n.has(kHostValid) && n.has(kDeviceValid) && n.holds == 0;
        clean += is_clean && !n.has(kDetached);
        report.require(!is_clean || n.has(kDetached) || host_copies_.node_of(n.host) == node,
                       "I6: the host copy of node ", node, " is not among those that can go");
        if (n.has(kDetached)) {
            report.require(refs > 0 || n.pins > 0 || n.holds > 0, "I2: detached node ", node,
                           " is unowned");
            continue;
        }
        report.require(n.has(kDeviceResident) == (n.device != kNoBlock), "I4: node ", node,
                       " device state and id disagree");
        report.require(n.has(kHostValid | kHostLoading) == (n.host != kNoBlock), "I4: node ", node,
                       " host state and id disagree");
        report.require(n.has(kDeviceValid | kHostValid), "I2: node ", node, " has no copy");
        const NodeId parent = tree_.parent(node);
        report.require(tree_[parent].has(kRoot) || tree_.refs(parent) >= refs, "I5: node ", node,
                       " has ", refs, " refs, its parent ", tree_.refs(parent));
    }
    report.require(clean == host_copies_.size(), "I6: ", clean, " host copies can go, not ",
                   host_copies_.size());
    report.require(device_nodes == device_nodes_, "I1: ", device_nodes,
                   " nodes have a device id, not ", device_nodes_);
    report.require(held_nodes == held_nodes_, "I5: ", held_nodes, " nodes have holds, not ",
                   held_nodes_);
    report.require(uncounted_.evicted_device + uncounted_.evicted_host + uncounted_.dropped == 0,
                   "residency: evicted or dropped blocks have not been counted");
    evictable_.check(report);
    report.device.check([this](BlockId id) { return device_.is_free(id); });
    report.host.check([this](BlockId id) { return host_.is_free(id); });
}

}  // namespace aiokv
