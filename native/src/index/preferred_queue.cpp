#include "aiokv/preferred_queue.hpp"

#include <algorithm>

#include "aiokv/error.hpp"
#include "report.hpp"

namespace aiokv {

// -- levels ----------------------------------------------------------------------------------

Level Levels::open(std::uint32_t priority, std::uint64_t end) {
    const Rank rank = kRetained * (priority + 1) + std::min<Rank>(end, kRetained - 1);
    const auto known = open_.find(rank);
    if (known != open_.end()) return known->second;
    auto level = static_cast<Level>(ranks_.size());
    if (!free_.empty()) {
        level = free_.back();
        free_.pop_back();
    } else if (level > kMaxLevel) {
        throw UsageError("retain: " + std::to_string(open_.size()) +
                         " different ends of retentions are in use, which is the limit");
    } else {
        ranks_.emplace_back();
    }
    ranks_[level] = rank;
    open_.emplace(rank, level);
    return level;
}

std::vector<Levels::Rank> Levels::end(std::uint64_t now) {
    std::vector<Rank> ended;
    for (auto entry = open_.begin(); entry != open_.end();) {
        const auto [rank, level] = *entry;
        if (rank % kRetained > now) {
            ++entry;
            continue;
        }
        ended.push_back(rank);
        ranks_[level] = kNormal;
        ended_.push_back(level);
        entry = open_.erase(entry);
    }
    return ended;
}

void Levels::recycle() {
    free_.insert(free_.end(), ended_.begin(), ended_.end());
    ended_.clear();
}

// -- order -----------------------------------------------------------------------------------

PreferredQueue::Rank PreferredQueue::rank_of(RunId run) const {
    const Run& r = tree_.runs()[run];
    return r.has(kReserved) && r.share == served_ ? kServed : key_of(r);
}

// Returns the first run of the first part whose rank is at least `from`.
RunId PreferredQueue::first_from(Rank from) const {
    for (auto part = parts_.lower_bound(from); part != parts_.end(); ++part) {
        const Rank key = part->first;
        if (key > Levels::kNormal && from <= Levels::kNormal) {
            if (const RunId run = normal_.front(); run != kNoRun) return run;
        }
        const Rank served = kReservedPart | served_;
        if (key >= kReservedPart && from <= kServed) {
            const auto own = parts_.find(served);
            if (own != parts_.end()) return const_cast<RankedQueue&>(own->second).front();
        }
        if (key != served) return const_cast<RankedQueue&>(part->second).front();
    }
    return from <= Levels::kNormal ? normal_.front() : kNoRun;
}

RunId PreferredQueue::after(RunId run) const {
    const RunId next = queue_of(run).after(run);
    return next != kNoRun || parts_.empty() ? next : first_from(rank_of(run) + 1);
}

// -- runs ------------------------------------------------------------------------------------

TierQueue& PreferredQueue::enter_part(RunId run) {
    Run& r = tree_.runs()[run];
    if (r.share > 0 && r.level != kDemotedLevel) {
        r.set(kReserved);
        grow(run, r.length);
    }
    return part(key_of(r));
}

void PreferredQueue::defer(RunId run) {
    const Rank key = key_of(tree_.runs()[run]);
    queue_of(run).remove(run);
    leave(key);
}

void PreferredQueue::end_deferral(RunId run) {
    Run& r = tree_.runs()[run];
    shrink(run, r.length);
    r.clear(kReserved);
}

void PreferredQueue::remove_from_part(RunId run) {
    defer(run);
    end_deferral(run);
}

// Removes a part that has become empty.
void PreferredQueue::leave(Rank key) {
    if (key == Levels::kNormal) return;
    const auto part = parts_.find(key);
    if (part->second.front() == kNoRun) parts_.erase(part);
}

void PreferredQueue::clear() {
    normal_.clear();
    parts_.clear();
    std::ranges::fill(reserved_, 0);
}

void PreferredQueue::grow(RunId run, std::uint32_t blocks) {
    const Run& r = tree_.runs()[run];
    if (r.has(kReserved)) reserved_[r.share - 1] += blocks;
}

void PreferredQueue::shrink(RunId run, std::uint32_t blocks) {
    const Run& r = tree_.runs()[run];
    if (r.has(kReserved)) reserved_[r.share - 1] -= blocks;
}

// -- shares and the ends of retentions ---------------------------------------------------------

std::uint32_t PreferredQueue::excess_of(std::uint32_t share, std::int64_t change) const {
    const auto limit = static_cast<std::int64_t>(shares_[share - 1] * blocks_);
    const std::int64_t excess = reserved_[share - 1] + change - limit;
    return static_cast<std::uint32_t>(std::max<std::int64_t>(excess, 0));
}

RunId PreferredQueue::first_reserved(std::uint32_t share) const {
    const auto part = parts_.find(kReservedPart | share);
    return part == parts_.end() ? kNoRun : const_cast<RankedQueue&>(part->second).front();
}

void PreferredQueue::end_reservation(RunId run) {
    remove(run);
    part(levels_.rank(tree_.runs()[run].level)).push_back(run);
}

void PreferredQueue::end_level(Rank rank) {
    const auto part = parts_.find(rank);
    if (part == parts_.end()) return;
    for (RunId run; (run = part->second.front()) != kNoRun;) {
        part->second.remove(run);
        tree_.runs()[run].level = kNormalLevel;
        normal_.push_back(run);
    }
    parts_.erase(part);
}

void PreferredQueue::check(Report& report, const std::vector<std::uint32_t>& reserved) const {
    for (const auto& [key, part] : parts_) {
        RunId run = const_cast<RankedQueue&>(part).front();
        report.require(run != kNoRun, "I6: part ", key, " of an eviction queue is empty");
        for (; run != kNoRun; run = part.after(run)) {
            const Rank rank = key_of(tree_.runs()[run]);
            report.require(rank == key, "I6: run ", run, " is in part ", key, ", not in ", rank);
        }
    }
    report.require(reserved == reserved_, "I6: the shares of salts miscount");
}

}  // namespace aiokv
