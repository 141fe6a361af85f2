// Device ids and the steps that may still use them.
//
// GPU work is asynchronous: an id freed in step s may still be read or written until the event of
// s is done. Such ids cool down apart and are given out only when no other id is left, those of the
// oldest step first; a transfer into one waits, on the device, for after_step(). Nothing can be
// transferred into an id of a step that is not closed yet: it has no event to wait for.
//
// The end of a step costs the same however many ids it frees: they go back to the bitmap as ids are
// taken, a few more than that each time.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <span>
#include <utility>

#include "aiokv/block_pool.hpp"
#include "aiokv/slab.hpp"

namespace aiokv {

using Step = std::uint32_t;  // 0: finished, or never used

class DevicePool {
  public:
    explicit DevicePool(std::uint32_t capacity)
        : pool_(capacity), steps_(capacity, 0, Pages::kSmall) {}

    std::uint32_t capacity() const { return pool_.capacity(); }
    std::uint32_t free_blocks() const {
        return pool_.free_blocks() + cool_blocks_ + cooling_blocks_;
    }
    std::uint32_t cooling_blocks() const { return cooling_blocks_; }
    // Free ids that a transfer may write now or after the event of a closed step.
    std::uint32_t writable_blocks() const {
        std::uint32_t blocks = free_blocks();
        for (auto open = cooling_.upper_bound(closed_); open != cooling_.end(); ++open) {
            blocks -= static_cast<std::uint32_t>(open->second.size());
        }
        return blocks;
    }
    bool is_writable(BlockId id) const { return after_step(id) <= closed_; }
    // Whether a step behind the open one computes the block.
    bool is_ahead(BlockId id) const { return after_step(id) > closed_ + 1; }
    bool is_free(BlockId id) const {
        const auto has = [id](const std::deque<BlockId>& ids) {
            return std::find(ids.begin(), ids.end(), id) != ids.end();
        };
        return pool_.is_free(id) || std::any_of(cool_.begin(), cool_.end(), has) ||
               std::any_of(cooling_.begin(), cooling_.end(),
                           [&](const auto& cooling) { return has(cooling.second); });
    }
    std::size_t bytes() const { return pool_.bytes() + steps_.bytes(); }

    // Takes ids of finished steps first. Requires out.size() <= free_blocks().
    void take(std::span<BlockId> out) {
        settle(out.size() + kSettledPerTake);
        const std::size_t rested = std::min<std::size_t>(out.size(), pool_.free_blocks());
        pool_.take_lowest(out.first(rested));
        for (BlockId& id : out.subspan(rested)) {
            const auto oldest = cooling_.begin();
            id = oldest->second.back();
            oldest->second.pop_back();
            --cooling_blocks_;
            if (oldest->second.empty()) cooling_.erase(oldest);
        }
    }

    void give_back(BlockId id) {
        const Step step = after_step(id);
        if (step == 0) return pool_.give_back(id);
        cooling_[step].push_back(id);
        ++cooling_blocks_;
    }

    // Gives back the ids id_of(0) to id_of(count - 1), in this order. Consecutive ids cost less.
    template <class IdOf>
    void give_back_all(std::uint32_t count, IdOf id_of) {
        const bool may_wait = unfinished_step() != 0;
        const auto waits = [&](BlockId id) { return may_wait && after_step(id) != 0; };
        for (std::uint32_t i = 0; i < count;) {
            BlockId low = id_of(i++);
            BlockId high = low;
            if (waits(low)) {
                give_back(low);
                continue;
            }
            // Ids that one lease has taken together follow one another, in either order.
            const BlockId next = i < count ? id_of(i) : low;
            const BlockId direction = next == low + 1 ? 1 : next + 1 == low ? -1 : 0;
            BlockId id = low;
            for (; direction != 0 && i < count && id_of(i) == id + direction; ++i) {
                if (waits(id + direction)) break;
                id += direction;
            }
            (direction > 0 ? high : low) = id;
            pool_.give_back({low, static_cast<std::uint32_t>(high - low + 1)});
        }
    }

    // Frees all ids except these. Requires that no unfinished step uses one.
    void free_all_but(std::span<const BlockId> used) {
        pool_.free_all_but(used);
        cool_.clear();
        cool_blocks_ = 0;
    }

    // `step` reads or writes the blocks.
    void use_in(std::span<const BlockId> ids, Step step) {
        if (step <= finished_ || ids.empty()) return;
        if (steps_.size() < capacity()) steps_.grow(capacity() - steps_.size());
        for (const BlockId id : ids) {
            Step& newest = steps_[static_cast<std::size_t>(id)];
            newest = std::max(newest, step);
        }
        newest_ = std::max(newest_, step);
    }
    void use_in(BlockId id, Step step) { use_in({&id, 1}, step); }

    // Returns the unfinished step that a transfer of this block must wait for, or 0.
    Step after_step(BlockId id) const {
        const auto index = static_cast<std::size_t>(id);
        if (index >= steps_.size() || steps_[index] <= finished_) return 0;
        return steps_[index];
    }

    void finish_step(Step step) {
        finished_ = std::max(finished_, step);
        closed_ = std::max(closed_, step);
        while (!cooling_.empty() && cooling_.begin()->first <= finished_) {
            std::deque<BlockId>& ids = cooling_.begin()->second;
            const auto blocks = static_cast<std::uint32_t>(ids.size());
            cooling_blocks_ -= blocks;
            cool_blocks_ += blocks;
            cool_.push_back(std::move(ids));
            cooling_.erase(cooling_.begin());
        }
    }

    // Closes the steps up to this one: from now on, they have events that transfers can wait for.
    void close_step(Step step) { closed_ = std::max(closed_, step); }

    Step finished_step() const { return finished_; }
    // Returns the newest unfinished step that uses a block; 0 if there is none.
    Step unfinished_step() const { return newest_ > finished_ ? newest_ : 0; }

    // Throws UsageError when an id >= capacity is in use.
    void resize(std::uint32_t capacity) {
        settle(cool_blocks_);
        pool_.resize(capacity);
    }

  private:
    static constexpr std::size_t kSettledPerTake = 64;

    // Moves at least this number of ids of finished steps into the bitmap, or all of them if there
    // are fewer.
    void settle(std::size_t blocks) {
        while (blocks > 0 && !cool_.empty()) {
            std::deque<BlockId>& ids = cool_.front();
            for (; blocks > 0 && !ids.empty(); --blocks) {
                pool_.give_back(ids.front());
                ids.pop_front();
                --cool_blocks_;
            }
            if (ids.empty()) cool_.pop_front();
        }
    }

    BlockPool pool_;
    Slab<Step> steps_;  // newest step that used each id; empty until a step is named
    std::map<Step, std::deque<BlockId>> cooling_;  // free ids by the step that they wait for
    std::deque<std::deque<BlockId>> cool_;         // free ids of finished steps
    std::uint32_t cool_blocks_ = 0;
    std::uint32_t cooling_blocks_ = 0;
    Step finished_ = 0;
    Step closed_ = 0;
    Step newest_ = 0;  // newest step that used a block
};

}  // namespace aiokv
