// Saves of computed blocks from device ids of a server to the host tier.
//
// The index has no device copies in this mode, so a block enters the tree with the end of its save,
// once its bytes are proven (I4). Until then it is known here by the place above it: a node of the
// tree, which is held, or another block that is being saved. So the blocks of a lease need not wait
// for the saves of those before them, and leases that compute the same block share one save:
//
//   node --- saved, proven --- copying --- queued      blocks of lease a
//                         \--- queued                  a block of lease b, behind the same node
//
// While a block is copied, a store may bring it, and another lease may save the block below behind
// its node. The block below is then saved twice: the first one that is proven enters the tree.
//
// A proven block waits for the block above it. A block that is lost takes those below it along; the
// host id of a copy in flight is given back when the copy ends (I3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/device_pool.hpp"
#include "aiokv/device_uses.hpp"
#include "aiokv/external_groups.hpp"
#include "aiokv/index.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/promises.hpp"
#include "aiokv/residency.hpp"
#include "aiokv/reuse_sketch.hpp"
#include "aiokv/run_pool.hpp"
#include "aiokv/store_saver.hpp"
#include "aiokv/transfer_ledger.hpp"

namespace aiokv {

class ExternalSaves {
  public:
    ExternalSaves(const CoreConfig& config, const DevicePool& device, RunPool& host,
                  LeaseTable& leases, Index& index, Residency& residency, StoreSaver& store_saver,
                  TransferLedger& transfers, Promises& promises, DeviceUses& uses,
                  ExternalGroups& groups);

    // Queues saves of the computed, named, full blocks of a lease that the host lacks, if the write
    // policy wants them, and of the copies of other groups. Stops before the first block that an
    // onload writes, and before one for which the host has no free block while the server keeps
    // the block; see Lease::kept_blocks. Returns the number of queued blocks.
    std::uint32_t publish(Lease& lease);
    // Calls publish() again for granted leases whose last call has stopped at a block that an
    // onload wrote.
    void publish_postponed();
    // Returns the device ids that publish() has queued since the last call of this function or of
    // take().
    std::vector<BlockId> take_queued_ids() { return std::exchange(queued_ids_, {}); }
    // Lets other leases wait for the blocks that this lease will save.
    void announce(Lease& lease);
    // Call when the lease gives its blocks up. Their saves continue.
    void leave(Lease& lease);
    // Call when the request of the lease has ended: it waits for its saves in flight, and promises
    // no blocks.
    void retire(Lease& lease);
    // Call when the lease has no handle any more: it promises only the blocks that are being saved.
    void keep_promise(Lease& lease);
    void hand_over(Lease& lease, Lease& keeper);
    // Call when the server lets a lease overwrite this id while a save may read it: the saved bytes
    // are then not those of the block.
    void note_overwritten(BlockId device);

    bool wants() const { return !queue_.empty(); }
    // Begins one transfer of all queued blocks for which the host has room. Returns 0 if there is
    // nothing to copy.
    TransferId take();
    // Drops the queued blocks, because no transfer will take them.
    void give_up_queue();
    void reset();
    // Drops the blocks of some contexts that are being saved: they will not be inserted.
    void purge(const std::vector<bool>& contexts);

    bool has(TransferId id) const { return in_flight_.contains(id); }
    const Transfer& get(TransferId id) const { return in_flight_.at(id).transfer; }
    // Ends a transfer whose first `good` blocks have arrived.
    void complete(TransferId id, std::uint32_t good);

    // Returns the newest unfinished step that saves of the lease's ids wait for; 0 if there is
    // none.
    Step after_step(LeaseId lease) const;

    // Returns the released leases that waited for saves only. The caller ends them.
    std::vector<LeaseId> take_ended();
    // Returns the leases of which blocks have become matchable since the last call.
    std::vector<LeaseId> take_advanced() { return std::exchange(advanced_, {}); }

    void add_to(CoreStatistics& statistics) const;
    void check(Report& report) const;

  private:
    using Place = SavePlace;

    enum class State : std::uint8_t {
        kFree,
        kQueued,
        kCopying,
        kProven,  // waits for the block above it
        kLost,    // no lease uses it; freed when its copy, or its wait, ends
    };
    struct Block {
        State state = State::kFree;
        bool overwritten = false;
        bool is_in_bucket = false;
        SaveId next_in_bucket = kNone;
        Place above = 0;
        std::uint64_t epoch = 0;
        std::uint64_t token_hash = 0;
        std::uint32_t context = 0;
        std::uint32_t depth = 0;  // number of blocks before it in the prompt
        std::vector<std::int32_t> tokens;
        ItemKey items = kNoItems;
        BlockId device = kNoBlock;
        BlockId host = kNoBlock;
        LeaseId reader = 0;           // lease that has named the device id
        std::vector<LeaseId> leases;  // leases whose Lease::saving has the block
        std::vector<SaveId> below;
    };
    // Blocks that enter the tree together.
    struct Chain {
        std::vector<SaveId> ids;
        std::vector<std::int32_t> tokens;
        std::vector<ItemKey> items;
        std::vector<NodeId> nodes;
    };
    struct InFlight {
        Transfer transfer;
        std::vector<SaveId> blocks;
    };

    std::uint32_t queue_blocks(Lease& lease);
    bool should_evict(const Lease& lease, std::size_t end) const;
    std::size_t target(Lease& lease);
    void count_uses(Lease& lease, std::size_t blocks);
    std::size_t before_written(Lease& lease, std::size_t blocks);
    void join_indexed(Lease& lease, std::size_t end);
    SaveId find(Place above, std::uint64_t token_hash, Tokens tokens, ItemKey items) const;
    SaveId queue(Lease& lease, std::size_t block, Place above, std::uint64_t token_hash);
    void link(SaveId id, Place above);
    void unlink(SaveId id);
    void let_go(Place above, std::uint32_t context);
    bool is_current(const Block& block) const;
    void lose(SaveId top);
    void cut(Lease& lease, SaveId id);
    void free(SaveId id);
    void insert(SaveId first);
    void insert_chain(SaveId first, std::vector<SaveId>& next);
    void note_changed(Lease& lease);
    void announce_changed();
    std::size_t bucket_of(Place above, std::uint64_t token_hash) const;
    void put_in_bucket(SaveId id);
    void add_buckets();
    void end_reads(const InFlight& save);

    const CoreConfig& config_;
    const DevicePool& device_;
    RunPool& host_;
    LeaseTable& leases_;
    Index& index_;
    Residency& residency_;
    StoreSaver& store_saver_;
    TransferLedger& transfers_;
    Promises& promises_;
    DeviceUses& uses_;
    ExternalGroups& groups_;
    std::optional<ReuseSketch> offered_;  // blocks seen before, for kNthUse

    std::deque<Block> blocks_;
    std::vector<SaveId> free_;
    std::vector<SaveId> buckets_;  // blocks by place and tokens; their number is a power of two
    std::deque<SaveId> queue_;     // includes lost blocks until they are taken
    std::unordered_map<TransferId, InFlight> in_flight_;
    std::vector<BlockId> queued_ids_;
    std::set<LeaseId> postponed_;   // leases whose publish() stopped at a block being written
    std::vector<LeaseId> changed_;  // their promises are withdrawn until announce_changed()
    std::vector<LeaseId> advanced_;
    std::vector<LeaseId> ended_;
    Chain chain_;  // of insert_chain(), which keeps its memory
    std::uint64_t saved_ = 0;
    std::uint64_t failed_ = 0;
    std::uint64_t skipped_ = 0;
    std::uint64_t published_ = 0;
};

}  // namespace aiokv
