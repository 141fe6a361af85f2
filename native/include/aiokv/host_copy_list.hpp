// Blocks with a copy on the device and one on the host, whose host copy can be freed: newest
// first, linked by host id. Each operation takes O(1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiokv/node.hpp"

namespace aiokv {

class HostCopyList {
  public:
    explicit HostCopyList(std::uint32_t host_blocks) : entries_(host_blocks) {}

    std::uint32_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    bool contains(BlockId host) const { return entries_[at(host)].node != kNone; }
    NodeId node_of(BlockId host) const { return entries_[at(host)].node; }

    BlockId newest() const { return newest_; }  // kNoBlock: there is none
    BlockId older(BlockId host) const { return entries_[at(host)].older; }

    // As the newest; one that is in the list stays where it is.
    void add(BlockId host, NodeId node) {
        Entry& entry = entries_[at(host)];
        if (entry.node != kNone) return;
        entry = {node, kNoBlock, newest_};
        if (newest_ != kNoBlock) entries_[at(newest_)].newer = host;
        newest_ = host;
        ++size_;
    }
    // Nothing happens when it is not in the list.
    void remove(BlockId host) {
        Entry& entry = entries_[at(host)];
        if (entry.node == kNone) return;
        if (entry.older != kNoBlock) entries_[at(entry.older)].newer = entry.newer;
        (entry.newer == kNoBlock ? newest_ : entries_[at(entry.newer)].older) = entry.older;
        entry = Entry{};
        --size_;
    }

  private:
    struct Entry {
        NodeId node = kNone;
        BlockId newer = kNoBlock;
        BlockId older = kNoBlock;
    };

    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }

    std::vector<Entry> entries_;  // by host id
    BlockId newest_ = kNoBlock;
    std::uint32_t size_ = 0;
};

}  // namespace aiokv
