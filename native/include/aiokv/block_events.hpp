// Changes of what the tiers hold, for subscribers outside the engine.
//
// Residency calls changed() whenever a copy of a block becomes valid or is lost, and when a block
// becomes unmatchable; no other code knows of subscribers. Without one, such a call is a branch.
//
// Each subscriber has a stream, and the stream knows what it has reported of each block: so the
// reports are a function of the current state, and a change that is reverted before it was
// reported is not lost. A stream begins with a *sweep*: drain() walks over all nodes, a part per
// call, and reports the blocks that exist. A change of a block that the sweep has not reached is
// left to the sweep. A block is reported after the blocks before it in its prompt.
//
// A stream with stores also reports the blocks of the tiers that a store has, when a save or a
// fetch of theirs has ended. They stay reported when the tiers have lost them, because the stores
// keep them, until a lookup has found that no store does.
//
// A stream whose queue is full drops it, reports that everything is gone, and sweeps again. A
// stream with stores does so after a purge, which removes blocks that the index does not know, and
// when it has reported more stored blocks than it may remember.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/digest.hpp"
#include "aiokv/index.hpp"
#include "aiokv/stored_blocks.hpp"

namespace aiokv {

class Report;

using EventStreamId = std::uint32_t;

enum class BlockEvent : std::uint8_t {
    kStored,   // copies on the medium have become valid
    kRemoved,  // copies on the medium are no longer there, or cannot be matched
    kCleared,  // no block is on any medium
};

enum class Medium : std::uint8_t { kDevice, kHost, kStore };

// One event of consecutive blocks of a prompt (kStored), or of blocks in any order (kRemoved).
struct BlockRun {
    BlockEvent event = BlockEvent::kStored;
    Medium medium = Medium::kDevice;
    bool has_parent = false;  // false: the first block of `digests` begins a prompt
    Digest parent{};          // digest of the block before the first block of `digests`
    std::vector<Digest> digests;
    // Set for kStored only:
    std::string context;
    std::vector<std::int32_t> tokens;
    std::vector<std::string> items;  // item keys; empty if no item touches any of the blocks
};

struct EventCounts {
    std::uint64_t dropped_blocks = 0;  // events of blocks that a full queue has dropped
    std::uint64_t restarts = 0;        // number of times that a full queue was dropped
};

class BlockEvents {
  public:
    BlockEvents(const CoreConfig& config, const Index& index, StoredBlocks& stored)
        : config_(config), index_(index), tree_(index.tree()), stored_(stored) {}

    // -- called by Residency
    // The valid copies of the node have changed, or it became unmatchable.
    void changed(NodeId node) {
        if (!streams_.empty()) [[unlikely]]
            report_change(node);
    }
    bool has_streams() const { return !streams_.empty(); }
    // All nodes are about to become unmatchable.
    void clear();
    // Objects of blocks were removed from the stores.
    void note_purge();
    // A block that no tier has is in no store, either.
    void note_lacking(const Digest& digest);
    bool has_stores() const { return has_stores_; }

    // -- streams
    // Opens a stream that reports all existing blocks, and then each change. Its queue holds events
    // of at most `max_blocks` blocks.
    EventStreamId open(std::size_t max_blocks, bool with_stores);
    void close(EventStreamId id);
    // Reports all existing blocks once more, after the current sweep. Call when a subscriber has
    // joined later than the others.
    void repeat(EventStreamId id);
    // Returns true if the stream has events or sweeps; false if it has reported the present state.
    bool is_due(EventStreamId id) const;
    // Returns the next events, in order: about `max_blocks` blocks, sometimes a few more. During a
    // sweep, the result may be empty.
    std::vector<BlockRun> drain(EventStreamId id, std::size_t max_blocks);
    EventCounts counts(EventStreamId id) const { return stream(id).counts; }

    void check(Report& report) const;

  private:
    static constexpr std::uint8_t kSwept = 1 << 7;  // reported since the last sweep began

    struct Stream {
        std::size_t max_blocks = 0;
        std::uint8_t media = 0;              // a bit per medium that it reports
        std::vector<std::uint8_t> reported;  // by node: a bit per medium, and kSwept
        std::deque<BlockRun> queue;
        std::size_t queued_blocks = 0;
        std::unordered_set<std::uint64_t> in_stores;  // beginnings of the digests reported there
        bool sweeps = false;
        bool sweeps_again = false;
        NodeId next = 0;  // next node of the sweep
        EventCounts counts;

        std::uint8_t& of(NodeId node) {
            if (node >= reported.size()) reported.resize(std::size_t{node} * 5 / 4 + 64, 0);
            return reported[node];
        }
        std::uint8_t at(NodeId node) const { return node < reported.size() ? reported[node] : 0; }
        void begin_sweep(NodeId end);
        void clear();
        void restart(NodeId end) {
            clear();
            begin_sweep(end);
        }
    };

    NodeId note_root(NodeId node);
    Stream& stream(EventStreamId id);
    const Stream& stream(EventStreamId id) const;
    std::uint8_t visible(const Stream& stream, NodeId node) const;
    void report_change(NodeId node);
    void report_stored(Stream& stream, NodeId node);
    template <class Takes>
    static BlockRun* open_run(Stream& stream, BlockEvent event, Medium medium, Takes takes);
    void add_stored(Stream& stream, NodeId node, std::uint8_t media);
    void add_removed(Stream& stream, const Digest& digest, std::uint8_t media);
    void sweep(Stream& stream, std::size_t max_blocks);
    void restart_if_full(Stream& stream);

    const CoreConfig& config_;
    const Index& index_;
    const PrefixTree& tree_;
    StoredBlocks& stored_;
    std::unordered_map<EventStreamId, Stream> streams_;
    EventStreamId last_id_ = 0;
    bool has_stores_ = false;      // a stream reports the stores
    std::vector<NodeId> roots_;    // roots of reported nodes
    std::vector<NodeId> unswept_;  // scratch
};

}  // namespace aiokv
