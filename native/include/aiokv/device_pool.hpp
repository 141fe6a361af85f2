// Device ids and the steps that may still use them.
//
// GPU work is asynchronous: an id freed in step s may still be read or written until the event of
// s is done. Such ids cool down apart and are given out only when no other id is left; a transfer
// into one waits, on the device, for after_step().
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "aiokv/block_pool.hpp"

namespace aiokv {

using Step = std::uint32_t;  // 0: finished, or never used

class DevicePool {
  public:
    explicit DevicePool(std::uint32_t capacity) : pool_(capacity) {}

    std::uint32_t capacity() const { return pool_.capacity(); }
    std::uint32_t free_blocks() const {
        return pool_.free_blocks() + static_cast<std::uint32_t>(cooling_.size());
    }
    std::uint32_t cooling_blocks() const { return static_cast<std::uint32_t>(cooling_.size()); }
    bool is_free(BlockId id) const {
        return pool_.is_free(id) || std::any_of(cooling_.begin(), cooling_.end(),
                                                [id](const Cooling& c) { return c.id == id; });
    }
    std::size_t bytes() const { return pool_.bytes() + steps_.capacity() * sizeof(Step); }

    // Requires out.size() <= free_blocks().
    void take(std::span<BlockId> out) {
        const std::size_t cool = std::min<std::size_t>(out.size(), pool_.free_blocks());
        pool_.take_lowest(out.first(cool));
        for (BlockId& id : out.subspan(cool)) {
            id = cooling_.front().id;
            cooling_.pop_front();
        }
    }

    void give_back(BlockId id) {
        const Step step = after_step(id);
        if (step == 0) return pool_.give_back(id);
        cooling_.push_back({step, id});
    }

    // `step` reads or writes the block.
    void use_in(BlockId id, Step step) {
        if (step <= finished_) return;
        if (steps_.size() < capacity()) steps_.resize(capacity(), 0);
        Step& newest = steps_[static_cast<std::size_t>(id)];
        newest = std::max(newest, step);
        newest_ = std::max(newest_, step);
    }

    // The unfinished step that a transfer of this block has to wait for, or 0.
    Step after_step(BlockId id) const {
        const auto index = static_cast<std::size_t>(id);
        if (index >= steps_.size() || steps_[index] <= finished_) return 0;
        return steps_[index];
    }

    void finish_step(Step step) {
        finished_ = std::max(finished_, step);
        std::erase_if(cooling_, [this](const Cooling& cooling) {
            if (cooling.step > finished_) return false;
            pool_.give_back(cooling.id);
            return true;
        });
    }

    Step finished_step() const { return finished_; }
    // The newest step that uses a block and has not finished; 0: none.
    Step unfinished_step() const { return newest_ > finished_ ? newest_ : 0; }

    void resize(std::uint32_t capacity) { pool_.resize(capacity); }

  private:
    struct Cooling {
        Step step;
        BlockId id;
    };

    BlockPool pool_;
    std::vector<Step> steps_;  // newest step that used each id; empty until a step is named
    std::deque<Cooling> cooling_;
    Step finished_ = 0;
    Step newest_ = 0;  // that ever used a block
};

}  // namespace aiokv
