#include "aiokv/block_group.hpp"

#include <utility>

#include "report.hpp"

namespace aiokv {

BlockGroup::BlockGroup(const CoreConfig& config, GroupId number, Index& index,
                       TransferLedger& transfers, GroupPool device, std::uint32_t host_blocks)
    : pool(std::move(device)),
      number_(number),
      device_blocks_(number == kRecurrentState
                         ? config.state_slots
                         : config.windows[static_cast<std::size_t>(number)].device_blocks),
      index_(index) {
    if (host_blocks > 0) host.emplace(config, index, pool, transfers, host_blocks, number);
}

void BlockGroup::touch_hit(std::span<const NodeId> path) {
    pool.touch_hit(path);
    if (host) host->pool().touch_hit(path);
}

void BlockGroup::forget(NodeId node) {
    pool.forget(node);
    if (host) host->pool().forget(node);
}

BlockId BlockGroup::take() {
    BlockId id = kNoBlock;
    const bool evicts = pool.take(id);
    return taken(id, evicts);
}

BlockId BlockGroup::take_writable() {
    BlockId id = kNoBlock;
    const bool evicts = pool.take_writable(id);
    return taken(id, evicts);
}

BlockId BlockGroup::taken(BlockId id, bool evicts) {
    if (evicts) {
        ++evicted_;
        index_.change();
    }
    if (host) host->note_taken();
    return id;
}

void BlockGroup::attach(NodeId node, BlockId id) {
    pool.attach(node, id);
    index_.tree()[node].set(kHasSides);
}

GroupStatistics BlockGroup::statistics() const {
    GroupStatistics s{};
    s.device.blocks = device_blocks_;
    s.device.free = pool.free_ids();
    s.device.cached = pool.attached();
    s.device.leased = s.device.blocks - s.device.free - s.device.cached;
    s.device.evicted_by_cause["capacity"] = evicted_;
    s.host.evicted_by_cause["capacity"] = 0;
    s.cloned = cloned;
    s.onloaded_blocks = onloaded;
    s.unsaved_by_cause["unsaved"] = 0;
    if (host) host->add_to(s);
    return s;
}

void BlockGroup::check(Report& report, Ownership ids, std::vector<std::uint32_t> readers,
                       std::vector<std::uint32_t> host_readers,
                       std::span<const BlockId> owned) const {
    pool.check(report, std::move(ids), readers, index_.tree());
    if (host) host->check(report, std::move(host_readers), owned);
}

}  // namespace aiokv
