// The blocks that granted leases will compute: a radix tree behind the nodes of the prefix index.
//
// A lease promises the named, full blocks that follow its *frontier*, the last indexed node of its
// path (or the root). Promises of one frontier that begin with equal blocks share the runs of those
// blocks, so a promise is added, removed or looked up in O(its own blocks + log promises), however
// many leases promise the same:
//
//   frontier --- run [2, 5) --- run [5, 9)    leases a, b end here
//                          \--- run [5, 7)    lease c ends here
//
// A run keeps no tokens: it names one of the leases that promise it, whose prompt has them. All is
// ordered by content and by time of arrival, never by address, so answers are deterministic (I9).
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "aiokv/core_types.hpp"

namespace aiokv {

class Report;

class Promises {
  public:
    // `leases`: records by lease index, which must outlive this object.
    Promises(const std::deque<Lease>& leases, std::uint32_t block_tokens)
        : leases_(leases), stride_(block_tokens) {}

    Promises(const Promises&) = delete;
    Promises& operator=(const Promises&) = delete;

    bool empty() const { return runs_in_use_ == 0; }
    // Number of runs, for tests: at most two per lease.
    std::size_t runs() const { return runs_in_use_; }

    // Adds a promise: the lease will compute its blocks from path.size() to the last named, full
    // one, behind lease.frontier. None of these may change before remove().
    void add(const Lease& lease);
    // Removes the promise of a lease. Does nothing if the lease has promised no block.
    void remove(const Lease& lease);
    void clear();
    // Calls remove(), and clears the frontier of the lease.
    void withdraw(Lease& lease) {
        if (lease.frontier == kNone) return;
        remove(lease);
        lease.frontier = kNone;
    }

    // Returns the longest run of blocks [first, limit) of a prompt that one lease will compute
    // behind `frontier`, and a lease that will compute it.
    Pending find(NodeId frontier, const Lease& prompt, std::size_t first, std::size_t limit) const;

    void check(Report& report) const;

  private:
    using RunId = std::uint32_t;
    // What a run follows: a node of the index, or another run as (kRunBit | id).
    using Place = std::uint64_t;
    static constexpr Place kRunBit = Place{1} << 32;

    struct Run {
        Place above = 0;
        std::uint32_t begin = 0;  // index of its first block in the prompt
        std::uint32_t end = 0;
        std::uint32_t text = kNone;   // lease_index of a lease that promises the run
        std::uint32_t first = kNone;  // lease_index of the oldest lease whose promise ends here
        std::uint32_t below = 0;      // number of runs that follow
    };
    // A lease whose promise ends in `run`. The leases of a run form a ring that begins with the
    // oldest.
    struct Link {
        RunId run = kNone;
        std::uint32_t prev = kNone;
        std::uint32_t next = kNone;
    };
    // Block `index` of the prompt of a lease, behind a place.
    struct Block {
        Place above;
        const Lease* lease;
        std::uint32_t index;
    };
    struct Order {
        using is_transparent = void;
        const Promises* promises;
        bool operator()(RunId a, RunId b) const {
            return promises->compare(promises->first_block(a), promises->first_block(b)) < 0;
        }
        bool operator()(RunId a, const Block& b) const {
            return promises->compare(promises->first_block(a), b) < 0;
        }
        bool operator()(const Block& a, RunId b) const {
            return promises->compare(a, promises->first_block(b)) < 0;
        }
        bool operator()(RunId a, Place b) const { return promises->runs_[a].above < b; }
        bool operator()(Place a, RunId b) const { return a < promises->runs_[b].above; }
    };

    Block first_block(RunId run) const {
        return {runs_[run].above, &leases_[runs_[run].text], runs_[run].begin};
    }
    int compare(const Block& a, const Block& b) const;
    bool is_equal(const Lease& a, const Lease& b, std::size_t block) const;
    // Returns the first block from `block` on that differs, or `end`.
    std::uint32_t common_end(const Lease& a, const Lease& b, std::uint32_t block,
                             std::uint32_t end) const;
    RunId child(const Block& block) const;
    RunId new_run(const Run& run);
    void place(RunId run);
    void unplace(RunId run);
    void erase_run(RunId run);
    RunId split(RunId run, std::uint32_t at);
    void absorb(RunId above);
    void link(RunId run, std::uint32_t lease_index);
    void unlink(std::uint32_t lease_index);

    const std::deque<Lease>& leases_;
    std::size_t stride_;
    std::deque<Run> runs_;
    std::vector<RunId> free_runs_;
    std::size_t runs_in_use_ = 0;
    std::set<RunId, Order> places_{Order{this}};
    // Nodes of `places_` to reuse. If they were freed, malloc would postpone collecting these small
    // pieces, and then collect those of thousands of runs in one call.
    std::deque<std::set<RunId, Order>::node_type> spare_;
    std::deque<Link> links_;  // by lease_index
};

}  // namespace aiokv
