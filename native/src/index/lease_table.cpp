#include "aiokv/lease_table.hpp"

#include <algorithm>
#include <string>

#include "aiokv/cache_lines.hpp"
#include "aiokv/error.hpp"
#include "aiokv/tick_clock.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

using enum LeaseState;

constexpr unsigned bit(LeaseState state) {
    return 1u << static_cast<unsigned>(state);
}

// The states that may follow, by state.
constexpr std::array<unsigned, kLeaseStates> kNext = {
    /* kFree */ bit(kMatched),  // open
    // grant or fork; a keeper, which takes over the blocks of another lease; release
    /* kMatched */ bit(kGranted) | bit(kReleasing) | bit(kFree),
    // a copy failed; swap_out; release with batches in flight; retract; release
    /* kGranted */ bit(kFailed) | bit(kSwapping) | bit(kReleasing) | bit(kMatched) | bit(kFree),
    // recompute_from; release with batches in flight; retract; release
    /* kFailed */ bit(kGranted) | bit(kReleasing) | bit(kMatched) | bit(kFree),
    // the copy succeeded; it failed; retract; release
    /* kSwapping */ bit(kSwapped) | bit(kGranted) | bit(kMatched) | bit(kFree),
    // grant (resume); retract; release
    /* kSwapped */ bit(kGranted) | bit(kMatched) | bit(kFree),
    // the last batch has ended
    /* kReleasing */ bit(kFree),
};

// Number of released leases whose memory for prompt and table is kept for reuse.
constexpr std::size_t kSpareLeases = 1024;
constexpr std::size_t kSmallBytes = 256;

// Copies a prompt, which is in no cache as a rule: a part is fetched while the one before it is
// copied.
void copy_prompt(std::span<const std::int32_t> prompt, std::vector<std::int32_t>& to) {
    constexpr std::size_t kPart = 512;
    constexpr std::size_t kLine = kLineBytes / sizeof(std::int32_t);
    to.clear();
    to.reserve(prompt.size());
    for (std::size_t at = 0; at < prompt.size(); at += kPart) {
        const std::size_t end = std::min(at + kPart, prompt.size());
        for (std::size_t i = end; i < std::min(end + kPart, prompt.size()); i += kLine) {
            prefetch_line(reinterpret_cast<const char*>(&prompt[i]));
        }
        to.insert(to.end(), &prompt[at], prompt.data() + end);
    }
}

template <class T>
void free_memory(std::vector<T>& values) {
    if (values.capacity() * sizeof(T) > kSmallBytes) std::vector<T>().swap(values);
}

}  // namespace

const char* name_of(LeaseState state) {
    constexpr std::array<const char*, kLeaseStates> names = {
        "free", "matched", "granted", "failed", "swapping", "swapped", "releasing"};
    return names[static_cast<std::size_t>(state)];
}

void LeaseTable::move(Lease& lease, LeaseState to) {
    if ((kNext[static_cast<std::size_t>(lease.state)] & bit(to)) == 0) {
        throw InternalError("lease " + std::to_string(lease.id()) + " cannot go from " +
                            name_of(lease.state) + " to " + name_of(to));
    }
    const bool computed = lease.has_blocks() && lease.flags.computes;
    if (lease.is_open()) --counts_[static_cast<std::size_t>(lease.state)];
    lease.state = to;
    if (lease.is_open()) ++counts_[static_cast<std::size_t>(to)];
    const bool computes = lease.has_blocks() && lease.flags.computes;
    if (computes == computed) return;
    const std::uint64_t now = tick_nanoseconds();
    if (computes) {
        ++computing_;
        lease.held_since_ns = now;
    } else {
        --computing_;
        hold_times_.add(now - lease.held_since_ns);
    }
}

bool LeaseTable::is_open(LeaseId id) const {
    const auto index = static_cast<std::uint32_t>(id);
    return index < leases_.size() && leases_[index].is_open() &&
           leases_[index].generation == id >> 32;
}

const Lease& LeaseTable::at(LeaseId id) const {
    if (!is_open(id)) {
        throw LeaseError("no such lease: it is released, or belongs to another engine").of(id);
    }
    return leases_[static_cast<std::uint32_t>(id)];
}

Lease& LeaseTable::at(LeaseId id) {
    return const_cast<Lease&>(static_cast<const LeaseTable*>(this)->at(id));
}

void LeaseTable::require_distinct(std::span<const LeaseId> ids, const char* call) {
    listed_.resize(leases_.size(), 0);
    if (++list_ == 0) {  // the number has wrapped
        std::fill(listed_.begin(), listed_.end(), 0);
        list_ = 1;
    }
    for (const LeaseId id : ids) {
        const auto index = static_cast<std::uint32_t>(id);
        if (index >= listed_.size()) continue;  // at() throws for this id
        if (listed_[index] == list_) {
            throw LeaseError(std::string(call) + ": a lease is listed more than once").of(id);
        }
        listed_[index] = list_;
    }
}

void LeaseTable::require_room() const {
    if (!free_.empty() || leases_.size() < max_leases_) return;
    throw UsageError(std::to_string(max_leases_) + " leases are open, which is the limit")
        .hint("release leases");
}

Lease& LeaseTable::open(std::span<const std::int32_t> tokens, std::uint32_t context,
                        LeaseFlags flags) {
    auto index = static_cast<std::uint32_t>(leases_.size());
    if (free_.empty()) {
        leases_.emplace_back();
    } else {
        index = free_.back();
        free_.pop_back();
    }
    Lease& lease = leases_[index];
    copy_prompt(tokens, lease.tokens);
    lease.context = context;
    lease.index = index;
    lease.flags = flags;
    ++lease.generation;
    lease.classes.clear();
    lease.missed.clear();
    lease.stored_blocks = 0;
    lease.prompt_tokens = static_cast<std::uint32_t>(tokens.size());
    lease.grown_blocks = 0;
    lease.computed_blocks = lease.device_hit = lease.host_hit = lease.known_blocks = 0;
    lease.store_hit = 0;
    lease.digests.clear();
    lease.counted_blocks = lease.due_blocks = lease.kept_blocks = 0;
    lease.save_failed = lease.retires = false;
    lease.opened_ns = tick_nanoseconds();
    move(lease, kMatched);
    return lease;
}

void LeaseTable::close(Lease& lease) {
    if (free_.size() >= kSpareLeases) {
        // Small pieces are kept: malloc would postpone collecting them, and then collect those of
        // thousands of leases in one call.
        free_memory(lease.tokens);
        free_memory(lease.path);
        free_memory(lease.item_keys);
        free_memory(lease.items);
        free_memory(lease.table);
        free_memory(lease.classes);
        free_memory(lease.digests);
        free_memory(lease.onloads);
        free_memory(lease.tail_host);
        free_memory(lease.peer_transfers);
        free_memory(lease.received);
        free_memory(lease.saving);
        free_memory(lease.recurrent.snapshots);
        free_memory(lease.windows);
        free_memory(lease.external);
        free_memory(lease.awaited_ids);
    }
    free_.push_back(lease.index);
}

std::vector<const Lease*> LeaseTable::oldest(std::size_t limit, std::size_t max_records) const {
    std::vector<const Lease*> open;
    for (std::size_t i = 0; i < std::min(max_records, leases_.size()); ++i) {
        if (leases_[i].is_open()) open.push_back(&leases_[i]);
    }
    const auto end = open.begin() + static_cast<std::ptrdiff_t>(std::min(limit, open.size()));
    std::partial_sort(open.begin(), end, open.end(), [](const Lease* a, const Lease* b) {
        return std::pair(a->opened_ns, a->index) < std::pair(b->opened_ns, b->index);
    });
    open.erase(end, open.end());
    return open;
}

double LeaseTable::age_seconds(const Lease& lease) {
    return static_cast<double>(tick_nanoseconds() - lease.opened_ns) * 1e-9;
}

std::uint32_t LeaseTable::open_leases() const {
    return static_cast<std::uint32_t>(leases_.size() - free_.size()) - count(kReleasing);
}

std::uint32_t LeaseTable::with_blocks() const {
    return count(kGranted) + count(kFailed) + count(kSwapping) + count(kReleasing);
}

void LeaseTable::check(Report& report) const {
    std::array<std::uint32_t, kLeaseStates> counts{};
    std::uint32_t computing = 0;
    for (const Lease& lease : leases_) {
        if (lease.is_open()) ++counts[static_cast<std::size_t>(lease.state)];
        computing += lease.has_blocks() && lease.flags.computes;
        report.require(lease.has_blocks() || lease.table.empty(), "I5: a ", name_of(lease.state),
                       " lease holds ", lease.table.size(), " blocks");
        report.require(lease.is(kSwapping) == (lease.swap_transfer != 0), "I3: a ",
                       name_of(lease.state), " lease has swap transfer ", lease.swap_transfer);
    }
    for (std::size_t state = 1; state < kLeaseStates; ++state) {
        report.require(counts[state] == counts_[state], "I5: ", counts[state], " leases are ",
                       name_of(static_cast<LeaseState>(state)), ", counted ", counts_[state]);
    }
    report.require(computing == computing_, "I1: ", computing, " leases compute, not ", computing_);
}

}  // namespace aiokv
