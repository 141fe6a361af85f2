// The invariants, checked from scratch, and the counters.
#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "aiokv/core.hpp"

namespace aiokv {

// Collects sentences; a check that holds costs no string.
class Report {
  public:
    template <class... Parts>
    void require(bool holds, const Parts&... parts) {
        if (holds) return;
        std::ostringstream text;
        (text << ... << parts);
        lines_.push_back(text.str());
    }
    std::vector<std::string> take() { return std::move(lines_); }

  private:
    std::vector<std::string> lines_;
};

namespace {

// Counts the owners of each id of one pool (I1).
class Ownership {
  public:
    Ownership(Report& report, const char* tier, std::uint32_t capacity)
        : report_(report), tier_(tier), owners_(capacity, 0) {}

    void own(BlockId id, const char* owner) {
        const bool valid = id >= 0 && static_cast<std::size_t>(id) < owners_.size();
        report_.require(valid, "I1: ", tier_, " id ", id, " of ", owner, " is outside the pool");
        if (valid) ++owners_[static_cast<std::size_t>(id)];
    }
    template <class IsFree>
    void check(IsFree is_free) const {
        for (std::size_t id = 0; id < owners_.size(); ++id) {
            const int owners = owners_[id] + is_free(static_cast<BlockId>(id));
            report_.require(owners == 1, "I1: ", tier_, " id ", id, " has ", owners, " owners");
        }
    }

  private:
    Report& report_;
    const char* tier_;
    std::vector<int> owners_;
};

}  // namespace

void Core::check_state(Report& report) const {
    if (!state_) return;
    Ownership slots(report, "state", state_->capacity());
    std::unordered_map<BlockId, std::uint32_t> holds;
    for (const Lease& lease : leases_) {
        if (lease.state_slot != kNoBlock) slots.own(lease.state_slot, "a lease");
        if (lease.held_snapshot != kNoBlock) ++holds[lease.held_snapshot];
        for (const UnattachedSnapshot& one : lease.snapshots) slots.own(one.slot, "a lease");
        report.require(lease.live || lease.state_slot == kNoBlock, "I5: a dead lease has a slot");
        const bool has_slot = lease.state_slot != kNoBlock;
        report.require(!lease.granted || has_slot == lease.computes, "I1: a granted lease has ",
                       has_slot ? "a" : "no", " state slot");
        report.require(!lease.state_valid || has_slot, "I1: a valid state has no slot");
    }
    for (const auto& [id, move] : moves_) {
        if (move.source != kNoBlock) ++holds[move.source];
        if (move.lease == 0) slots.own(move.target, "a move");
        report.require(move.lease == 0 || lease(move.lease).state_slot == move.target,
                       "I3: the target of state move ", id, " changed under way");
    }
    std::uint32_t attached = 0;
    for (BlockId id = 0; static_cast<std::uint32_t>(id) < state_->capacity(); ++id) {
        const bool is_attached = state_->is_attached(id);
        const std::uint32_t held = holds.contains(id) ? holds.at(id) : 0;
        attached += is_attached;
        if (is_attached || held > 0) slots.own(id, "a snapshot");
        report.require(state_->holds(id) == held, "I5: state slot ", id, " counts ",
                       state_->holds(id), " holds of ", held);
        if (!is_attached) continue;
        const NodeId node = state_->node_of(id);
        const bool live = tree_.is_live(node) && !tree_[node].has(kDetached | kRoot);
        report.require(live && tree_[node].has(kHasSides) && state_->find(node) == id,
                       "I2: the node of snapshot ", id, " does not know it");
    }
    report.require(attached == state_->attached(), "I1: ", state_->attached(), " of ", attached,
                   " snapshots are listed");
    slots.check([this](BlockId id) { return state_->is_free(id); });
}

// One group: its ids, who holds them, and what is set aside.
void Core::check_window(Report& report, std::size_t g) const {
    const WindowGroup& group = windows_[g];
    Ownership ids(report, "window", group.pool.capacity());
    std::vector<std::uint32_t> holds(group.pool.capacity(), 0);
    std::uint64_t reserved = 0;
    for (const Lease& lease : leases_) {
        if (lease.windows.empty()) continue;
        const WindowTable& window = lease.windows[g];
        reserved += window.reserved;
        report.require(!lease.granted || window.table.size() == lease.table.size(),
                       "I1: a window table has ", window.table.size(), " entries of ",
                       lease.table.size());
        const auto ids_held = static_cast<std::size_t>(std::count_if(
            window.table.begin(), window.table.end(), [](BlockId id) { return id != kNoBlock; }));
        report.require(ids_held <= window.reserved, "I1: a window has ", ids_held, " ids of ",
                       window.reserved);
        for (std::size_t i = 0; i < window.table.size(); ++i) {
            const BlockId id = window.table[i];
            const bool inside = (i >= window.first || group.is_sink(i)) && i < window.end;
            report.require(inside == (id != kNoBlock), "I1: entry ", i, " of a window is ", id);
            if (id == kNoBlock) continue;
            if (group.pool.holds(id) > 0) {
                ++holds[static_cast<std::size_t>(id)];
            } else {
                ids.own(id, "a lease");
            }
        }
    }
    for (BlockId id = 0; static_cast<std::uint32_t>(id) < group.pool.capacity(); ++id) {
        const std::uint32_t held = holds[static_cast<std::size_t>(id)];
        const bool attached = group.pool.is_attached(id);
        if (attached || held > 0) ids.own(id, "a node");
        report.require(group.pool.holds(id) == held, "I5: window block ", id, " counts ",
                       group.pool.holds(id), " holds of ", held);
        report.require(!attached || (tree_.is_live(group.pool.node_of(id)) &&
                                     !tree_[group.pool.node_of(id)].has(kDetached)),
                       "I2: the node of window block ", id, " has gone");
    }
    report.require(reserved == group.reserved && reserved <= group.pool.capacity(),
                   "I1: ", group.reserved, " window blocks are set aside, leases have ", reserved);
    ids.check([&group](BlockId id) { return group.pool.is_free(id); });
}

void Core::check_windows(Report& report) const {
    for (const Lease& lease : leases_) {
        const bool has_tables = lease.live && (lease.granted || lease.swapped) && !windows_.empty();
        report.require(has_tables ? lease.windows.size() == windows_.size() || lease.swapped
                                  : lease.windows.empty(),
                       "I1: a lease has tables of ", lease.windows.size(), " windows");
    }
    for (std::size_t g = 0; g < windows_.size(); ++g) check_window(report, g);
}

void Core::check_batches(Report& report) const {
    std::unordered_map<LeaseId, std::uint32_t> counts;
    for (const auto& [batch, leases] : batches_) {
        for (const LeaseId id : leases) ++counts[id];
    }
    std::size_t counted = 0;
    std::uint32_t releasing = 0;
    for (const Lease& lease : leases_) {
        const auto found = counts.find((LeaseId{lease.generation} << 32) | lease.slot);
        const std::uint32_t batches = found == counts.end() ? 0 : found->second;
        counted += batches > 0;
        report.require(lease.batches == batches, "I3: a lease counts ", lease.batches,
                       " batches of ", batches);
        report.require(batches == 0 || (lease.live && lease.granted),
                       "I3: a batch computes with a lease that holds no blocks");
        report.require(!lease.released || (lease.live && batches > 0),
                       "I3: a released lease waits for no batch");
        releasing += lease.released;
    }
    report.require(releasing == releasing_leases_, "I3: ", releasing_leases_, " of ", releasing,
                   " leases that wait for batches are counted");
    report.require(counted == counts.size(), "I3: batches name ", counts.size(), " leases, ",
                   counted, " are known");
}

void Core::check_uses(Report& report) const {
    std::size_t awaiting = 0;
    for (const Lease& lease : leases_) {
        if (!lease.live || lease.awaited == kNone) continue;
        ++awaiting;
        report.require(
            lease.granted && tree_.is_live(lease.awaited) && tree_[lease.awaited].has(kAwaitsUse),
            "I5: node ", lease.awaited, " does not tell a lease of its use");
    }
    report.require(awaiting == awaited_.size(), "I5: ", awaiting, " leases await a use, ",
                   awaited_.size(), " are listed");
}

std::vector<std::string> Core::violations() const {
    Report report;
    Ownership device(report, "device", device_.capacity());
    Ownership host(report, "host", host_.capacity());
    std::vector<std::uint32_t> refs(tree_.slots(), 0);
    std::vector<std::uint32_t> pins(tree_.slots(), 0);

    std::vector<std::uint32_t> holds(tree_.slots(), 0);
    std::uint64_t item_refs = tree_.item_keys().nodes();
    std::size_t nodes_with_items = 0;
    std::uint32_t computing_leases = 0;
    std::uint32_t granted_leases = 0;
    std::uint32_t swapped_leases = 0;
    for (const Lease& lease : leases_) {
        computing_leases += lease.granted && lease.computes;
        granted_leases += lease.granted;
        swapped_leases += lease.swapped;
        report.require(lease.live || !(lease.granted || lease.swapped || !lease.table.empty()),
                       "I5: a released lease holds ", lease.table.size(), " blocks");
        for (const ItemKey key : lease.item_keys) item_refs += key != kNoItems;
        if (!lease.live) continue;
        if (lease.swapped || lease.swap_out != 0) {
            for (const NodeId node : lease.path) ++holds[node];
        }
        if (lease.swapped) {
            for (const BlockId id : lease.tail_host) host.own(id, "a swapped lease");
        }
        if (!lease.granted) continue;
        report.require(lease.table.size() == blocks_for(lease.num_tokens), "I1: a lease of ",
                       lease.num_tokens, " tokens has ", lease.table.size(), " blocks");
        for (const NodeId node : lease.path) ++refs[node];
        for (std::size_t i = 0; i < lease.table.size(); ++i) {
            if (is_private(lease, i)) device.own(lease.table[i], "a lease");
        }
    }
    report.require(granted_leases == granted_leases_ && swapped_leases == swapped_leases_,
                   "I5: ", granted_leases, " leases are granted and ", swapped_leases,
                   " swapped, counted ", granted_leases_, " and ", swapped_leases_);
    for (const auto& [id, transfer] : transfers_) {
        for (std::size_t i = transfer.nodes.size(); i < transfer.device_blocks.size(); ++i) {
            host.own(transfer.host_blocks[i], "a swapped tail");
            if (transfer.orphaned) device.own(transfer.device_blocks[i], "a swapped tail");
        }
        for (std::size_t i = 0; i < transfer.nodes.size(); ++i) {
            const Node& n = tree_[transfer.nodes[i]];
            ++pins[transfer.nodes[i]];
            report.require(tree_.is_live(transfer.nodes[i]), "I3: transfer ", id,
                           " holds a freed node");
            report.require(
                n.device == transfer.device_blocks[i] && n.host == transfer.host_blocks[i],
                "I3: transfer ", id, " block ", i, " changed under way");
        }
    }

    std::uint32_t queued_device = 0;
    std::uint32_t queued_host = 0;
    std::uint32_t parked_device = 0;
    std::uint32_t idle_host = 0;
    std::uint32_t device_nodes = 0;
    std::uint32_t twins = 0;
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        const Node& n = tree_[node];
        if (!tree_.is_live(node) || n.has(kRoot)) continue;
        nodes_with_items += n.has(kHasItems);
        if (n.device != kNoBlock) device.own(n.device, "a node");
        if (n.host != kNoBlock) host.own(n.host, "a node");
        report.require(n.refs == refs[node], "I5: node ", node, " counts ", n.refs + 0, " refs of ",
                       refs[node]);
        const auto more = more_holds_.find(node);
        const std::uint32_t held = n.holds + (more == more_holds_.end() ? 0 : more->second);
        report.require(held == holds[node], "I5: node ", node, " counts ", held, " holds of ",
                       holds[node]);
        report.require(n.pins == pins[node], "I3: node ", node, " counts ", n.pins + 0, " pins of ",
                       pins[node]);
        device_nodes += n.device != kNoBlock;
        idle_host += n.has(kQueued | kParked) && !n.has(kDeviceValid) && n.holds == 0;
        const bool is_twin = n.has(kHostValid) && n.has(kDeviceValid) && n.holds == 0;
        twins += is_twin && !n.has(kDetached);
        report.require(!is_twin || n.has(kDetached) || twins_.node_of(n.host) == node,
                       "I6: the host copy of node ", node, " is not among those that can go");
        queued_device += n.has(kQueued) && n.has(kDeviceValid);
        queued_host += n.has(kQueued) && !n.has(kDeviceValid);
        parked_device += n.has(kParked) && n.has(kDeviceValid);
        if (n.has(kDetached)) {
            report.require(n.refs > 0 || n.pins > 0 || n.holds > 0, "I2: detached node ", node,
                           " is unowned");
            report.require(!n.has(kQueued | kParked), "I6: detached node ", node, " is queued");
            continue;
        }
        report.require(n.has(kDeviceResident) == (n.device != kNoBlock), "I4: node ", node,
                       " device state and id disagree");
        report.require(n.has(kHostValid | kHostLoading) == (n.host != kNoBlock), "I4: node ", node,
                       " host state and id disagree");
        report.require(n.has(kDeviceValid | kHostValid), "I2: node ", node, " has no copy");
        const Node& parent = tree_[n.parent];
        report.require(tree_.find_child(n.parent, tree_.tokens(node), tree_.items(node)) == node,
                       "I2: node ", node, " is not found under its parent");
        report.require(parent.has(kRoot) || parent.refs >= n.refs, "I5: node ", node, " has ",
                       n.refs + 0, " refs, its parent ", parent.refs + 0);
        report.require(!n.has(kDeviceResident) || parent.has(kRoot | kDeviceResident), "I2: node ",
                       node, " is on the device, its parent is not");
        const bool idle = n.refs == 0 && !n.has(kDeviceLoading);
        report.require(idle == n.has(kQueued | kParked), "I6: node ", node, " with ", n.refs + 0,
                       " refs is ", n.has(kQueued | kParked) ? "" : "not ", "evictable");
    }
    report.require(queued_device == device_queue_.size() && queued_host == host_queue_.size() &&
                       parked_device == parked_device_,
                   "I6: the eviction queues miscount");
    report.require(idle_host == idle_host_ && twins == twins_.size(), "I6: ", idle_host,
                   " host blocks and ", twins, " host copies can go, not ", idle_host_, " and ",
                   twins_.size());
    report.require(computing_leases == computing_leases_, "I1: ", computing_leases,
                   " leases compute, not ", computing_leases_);
    report.require(device_nodes == device_nodes_, "I1: ", device_nodes,
                   " nodes have a device id, not ", device_nodes_);
    report.require(nodes_with_items == tree_.item_keys().nodes(), "I5: ", nodes_with_items,
                   " nodes have items, ", tree_.item_keys().nodes(), " are listed");
    report.require(item_refs == tree_.item_keys().total_refs(), "I5: the keys of items count ",
                   tree_.item_keys().total_refs(), " refs of ", item_refs);
    check_state(report);
    check_windows(report);
    check_batches(report);
    check_uses(report);
    device.check([this](BlockId id) { return device_.is_free(id); });
    host.check([this](BlockId id) { return host_.is_free(id); });
    return report.take();
}

// What can be matched, in no order.
std::vector<BlockView> Core::blocks() const {
    std::vector<BlockView> views;
    std::vector<NodeId> path;
    for (NodeId node = 0; node < tree_.slots(); ++node) {
        if (!tree_.is_live(node) || tree_[node].has(kRoot | kDetached)) continue;
        path.clear();
        NodeId up = node;
        for (; !tree_[up].has(kRoot); up = tree_[up].parent) path.push_back(up);
        BlockView view{contexts_[static_cast<std::size_t>(tree_[up].device)].key, {}, &tree_[node]};
        for (std::size_t i = path.size(); i-- > 0;) {
            const std::int32_t* tokens = tree_.tokens(path[i]);
            view.prefix.insert(view.prefix.end(), tokens, tokens + config_.block_tokens);
        }
        views.push_back(std::move(view));
    }
    return views;
}

CoreStatistics Core::statistics() const {
    CoreStatistics s = counters_;
    s.device_free = device_.free_blocks();
    s.device_cooling = device_.cooling_blocks();
    s.host_free = host_.free_blocks();
    s.evictable_blocks = evictable();
    s.releasing_leases = releasing_leases_;
    s.leases = static_cast<std::uint32_t>(leases_.size() - free_leases_.size()) - releasing_leases_;
    s.device_in_flight = s.host_in_flight = 0;
    std::uint32_t orphans = 0;
    for (const auto& [id, transfer] : transfers_) {
        const auto nodes = static_cast<std::uint32_t>(transfer.nodes.size());
        const auto tail = static_cast<std::uint32_t>(transfer.device_blocks.size()) - nodes;
        const bool is_onload = transfer.direction == Direction::kOnload;
        orphans += transfer.orphaned ? tail : 0;
        s.device_in_flight += is_onload ? nodes : 0;
        s.host_in_flight += is_onload ? tail : nodes + tail;
    }
    s.device_cached = device_nodes_ - s.device_in_flight;
    s.device_in_flight += orphans;
    s.device_leased = device_.capacity() - s.device_free - s.device_cached - s.device_in_flight;
    s.host_cached = host_.capacity() - s.host_free - s.host_in_flight;
    s.state_free = state_ ? state_->free_ids() : 0;
    s.state_snapshots = state_ ? state_->attached() : 0;
    s.nodes = tree_.live_nodes();
    s.index_bytes = tree_.node_bytes() + tree_.fork_bytes() + device_.bytes() + host_.bytes() +
                    (reuse_ ? reuse_->bytes() : 0) + device_queue_.bytes() + host_queue_.bytes() +
                    (device_duel_ ? device_duel_->bytes() : 0) +
                    (host_duel_ ? host_duel_->bytes() : 0);
    s.token_bytes = tree_.token_bytes();
    return s;
}

}  // namespace aiokv
