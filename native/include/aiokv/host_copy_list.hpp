// Blocks with a copy on the device and one on the host, whose host copy can be freed. The list is
// linked by host id and begins with the blocks that the device evicts last. Each operation takes
// O(1).
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

    BlockId first() const { return first_; }  // kNoBlock: there is none
    BlockId after(BlockId host) const { return entries_[at(host)].next; }

    // Does nothing if the block is already in the list.
    void add_first(BlockId host, NodeId node) {
        if (contains(host)) return;
        entries_[at(host)] = {node, kNoBlock, first_};
        (first_ == kNoBlock ? last_ : entries_[at(first_)].previous) = host;
        first_ = host;
        ++size_;
    }
    void add_last(BlockId host, NodeId node) {
        if (contains(host)) return;
        entries_[at(host)] = {node, last_, kNoBlock};
        (last_ == kNoBlock ? first_ : entries_[at(last_)].next) = host;
        last_ = host;
        ++size_;
    }
    // Does nothing if the block is not in the list.
    void move_to_first(BlockId host) {
        if (host == first_ || !contains(host)) return;
        const NodeId node = node_of(host);
        remove(host);
        add_first(host, node);
    }
    void clear() {
        if (size_ > 0) *this = HostCopyList(static_cast<std::uint32_t>(entries_.size()));
    }
    // Does nothing if the block is not in the list.
    void remove(BlockId host) {
        Entry& entry = entries_[at(host)];
        if (entry.node == kNone) return;
        (entry.previous == kNoBlock ? first_ : entries_[at(entry.previous)].next) = entry.next;
        (entry.next == kNoBlock ? last_ : entries_[at(entry.next)].previous) = entry.previous;
        entry = Entry{};
        --size_;
    }

  private:
    struct Entry {
        NodeId node = kNone;
        BlockId previous = kNoBlock;
        BlockId next = kNoBlock;
    };

    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }

    std::vector<Entry> entries_;  // by host id
    BlockId first_ = kNoBlock;
    BlockId last_ = kNoBlock;
    std::uint32_t size_ = 0;
};

}  // namespace aiokv
