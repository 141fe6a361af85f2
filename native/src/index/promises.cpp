#include "aiokv/promises.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "aiokv/lease_table.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {

int Promises::compare(const Block& a, const Block& b) const {
    if (a.above != b.above) return a.above < b.above ? -1 : 1;
    const int order =
        std::memcmp(&a.lease->tokens[a.index * stride_], &b.lease->tokens[b.index * stride_],
                    stride_ * sizeof(std::int32_t));
    if (order != 0) return order;
    const ItemKey x = key_of(a.lease->item_keys, a.index);
    const ItemKey y = key_of(b.lease->item_keys, b.index);
    return x == y ? 0 : x < y ? -1 : 1;
}

bool Promises::is_equal(const Lease& a, const Lease& b, std::size_t block) const {
    return std::memcmp(&a.tokens[block * stride_], &b.tokens[block * stride_],
                       stride_ * sizeof(std::int32_t)) == 0 &&
           key_of(a.item_keys, block) == key_of(b.item_keys, block);
}

std::uint32_t Promises::common_end(const Lease& a, const Lease& b, std::uint32_t block,
                                   std::uint32_t end) const {
    while (block < end && is_equal(a, b, block)) ++block;
    return block;
}

Promises::RunId Promises::child(const Block& block) const {
    const auto found = places_.find(block);
    return found == places_.end() ? kNone : *found;
}

void Promises::place(RunId run) {
    if (spare_.empty()) {
        places_.insert(run);
        return;
    }
    auto node = std::move(spare_.back());
    spare_.pop_back();
    node.value() = run;
    places_.insert(std::move(node));
}

void Promises::unplace(RunId run) {
    spare_.push_back(places_.extract(places_.find(run)));
}

// Requires that `above` already counts the run.
Promises::RunId Promises::new_run(const Run& run) {
    auto id = static_cast<RunId>(runs_.size());
    if (free_runs_.empty()) {
        runs_.push_back(run);
    } else {
        id = free_runs_.back();
        free_runs_.pop_back();
        runs_[id] = run;
    }
    place(id);
    ++runs_in_use_;
    return id;
}

void Promises::erase_run(RunId run) {
    unplace(run);
    free_runs_.push_back(run);
    --runs_in_use_;
}

// Splits a run: a new run takes its place and its blocks before `at`. Returns the new run.
Promises::RunId Promises::split(RunId run, std::uint32_t at) {
    unplace(run);
    const Run& old = runs_[run];
    const RunId upper = new_run({old.above, old.begin, at, old.text, kNone, 1});
    runs_[run].above = kRunBit | upper;
    runs_[run].begin = at;
    place(run);
    return upper;
}

// Joins a run with the only one that follows it. No promise may end in the first one.
void Promises::absorb(RunId above) {
    const RunId below = *places_.lower_bound(kRunBit | above);
    unplace(below);
    const Run gone = runs_[above];
    erase_run(above);
    runs_[below].above = gone.above;
    runs_[below].begin = gone.begin;
    place(below);
}

void Promises::link(RunId run, std::uint32_t lease_index) {
    while (links_.size() <= lease_index) links_.emplace_back();
    const std::uint32_t first = runs_[run].first;
    if (first == kNone) {
        runs_[run].first = lease_index;
        links_[lease_index] = {run, lease_index, lease_index};
        return;
    }
    const std::uint32_t last = links_[first].prev;
    links_[lease_index] = {run, last, first};
    links_[last].next = links_[first].prev = lease_index;
}

void Promises::unlink(std::uint32_t lease_index) {
    const Link link = links_[lease_index];
    Run& run = runs_[link.run];
    links_[link.prev].next = link.next;
    links_[link.next].prev = link.prev;
    if (run.first == lease_index) run.first = link.next == lease_index ? kNone : link.next;
    links_[lease_index] = Link{};
}

void Promises::add(const Lease& lease) {
    const auto end = static_cast<std::uint32_t>(lease.tokens.size() / stride_);
    auto block = static_cast<std::uint32_t>(lease.path.size());
    if (block >= end) return;
    Place above = lease.frontier;
    for (;;) {
        RunId run = child({above, &lease, block});
        if (run == kNone) {
            run = new_run({above, block, end, lease.index, kNone, 0});
            if ((above & kRunBit) != 0) ++runs_[static_cast<RunId>(above)].below;
            return link(run, lease.index);
        }
        const std::uint32_t stop = std::min(runs_[run].end, end);
        block = common_end(leases_[runs_[run].text], lease, block, stop);
        if (block < runs_[run].end) run = split(run, block);
        if (block == end) return link(run, lease.index);
        above = kRunBit | run;
    }
}

void Promises::remove(const Lease& lease) {
    const std::uint32_t lease_index = lease.index;
    if (lease_index >= links_.size() || links_[lease_index].run == kNone) return;
    RunId run = links_[lease_index].run;
    Place place = kRunBit | run;  // last place whose run may name the lease
    unlink(lease_index);
    if (runs_[run].first == kNone && runs_[run].below == 0) {
        place = runs_[run].above;
        erase_run(run);
        if ((place & kRunBit) == 0) return;
        run = static_cast<RunId>(place);
        --runs_[run].below;
    }
    if (runs_[run].first == kNone && runs_[run].below == 1) {
        place = runs_[run].above;
        absorb(run);
    }
    // Runs that name the lease as `text` follow each other, and `place` is the last of them. Let
    // each name another lease.
    while ((place & kRunBit) != 0 && runs_[static_cast<RunId>(place)].text == lease_index) {
        Run& stale = runs_[static_cast<RunId>(place)];
        stale.text = stale.first != kNone ? stale.first : runs_[*places_.lower_bound(place)].text;
        place = stale.above;
    }
}

void Promises::clear() {
    places_.clear();
    runs_.clear();
    free_runs_.clear();
    links_.clear();
    runs_in_use_ = 0;
}

Pending Promises::find(NodeId frontier, const Lease& prompt, std::size_t first,
                       std::size_t limit) const {
    const auto end = static_cast<std::uint32_t>(limit);
    auto block = static_cast<std::uint32_t>(first);
    Pending found{0, 0};
    Place above = frontier;
    while (block < end) {
        const RunId run = child({above, &prompt, block});
        if (run == kNone) break;
        const Lease& owner = leases_[runs_[run].text];
        const std::uint32_t stop = runs_[run].end;
        block = common_end(owner, prompt, block, std::min(stop, end));
        found = {owner.id(), block - static_cast<std::uint32_t>(first)};
        if (block < stop) break;
        above = kRunBit | run;
    }
    return found;
}

void Promises::check(Report& report) const {
    report.require(places_.size() == runs_in_use_, "I5: ", places_.size(),
                   " runs of promised blocks have a place, ", runs_in_use_, " are in use");
    for (const Lease& lease : leases_) {
        const std::size_t end = lease.tokens.size() / stride_;
        if (lease.index >= links_.size() || links_[lease.index].run == kNone) {
            report.require(lease.frontier == kNone || lease.path.size() >= end,
                           "I5: the blocks behind ", lease.path.size(), " of ", end,
                           " are not promised");
            continue;
        }
        const RunId run = links_[lease.index].run;
        report.require(runs_[run].end == end, "I5: a lease promises blocks up to ", runs_[run].end,
                       " of ", end);
        Place place = kRunBit | run;
        while ((place & kRunBit) != 0) place = runs_[static_cast<RunId>(place)].above;
        report.require(lease.has_blocks() && place == lease.frontier, "I5: a ",
                       name_of(lease.state), " lease promises blocks behind node ", place,
                       ", its frontier is ", lease.frontier);
    }
}

}  // namespace aiokv
