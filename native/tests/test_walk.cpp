// Random calls of Core with all features at once; the invariants are checked after each of them.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "aiokv/core.hpp"
#include "aiokv/error.hpp"
#include "check.hpp"

using namespace aiokv;

namespace {

class Walk {
  public:
    explicit Walk(unsigned seed) : random_(seed), core_(random_config()) {}

    // Calls that the core refuses as wrong have to change nothing that breaks an invariant.
    void step() {
        try {
            call(below(22));
        } catch (const LeaseError&) {
        } catch (const UsageError&) {
        } catch (const RequestTooLarge&) {
        }
        for (const std::string& line : core_.violations()) check::fail("violations", 0, line);
        check_hot_prefixes();
    }

    // Ends all that is open. Every block has to be free or cached then.
    void finish() {
        for (const BatchId batch : batches_) core_.end_batch(batch, 0);
        for (const LeaseId id : leases_) core_.release(id, 0);
        for (const TransferId id : transfers_) core_.complete(id, Outcome::kDone, 0);
        core_.finish_step(step_);
        const CoreStatistics s = core_.statistics();
        CHECK_EQ(s.leases + s.releasing_leases, 0u);
        const TierCounts& device = s.attention.device;
        CHECK_EQ(device.leased + device.in_flight + s.attention.host.in_flight, 0u);
        CHECK_EQ(device.free + device.cached, core_.device_blocks());
        for (const std::string& line : core_.violations()) check::fail("violations", 0, line);
    }

  private:
    unsigned below(unsigned limit) { return static_cast<unsigned>(random_() % limit); }

    CoreConfig random_config() {
        CoreConfig config;
        config.block_tokens = 2;
        config.device_blocks = 8 + below(40);
        config.host_blocks = below(4) == 0 ? 0 : below(60);
        config.leave_tokens = 1 + below(3);
        config.reserve_blocks = below(3);
        config.write_policy = static_cast<SavePolicy>(below(4));
        config.low_watermark_blocks = below(6);
        config.min_onload_blocks = below(3);
        config.state_slots = below(3) == 0 ? 2 + below(8) : 0;
        if (below(3) == 0) config.windows.push_back({16 + below(20), 1 + below(6), 8, below(3)});
        if (below(2) == 0) return config;
        if (below(3) != 0) {
            config.state_slots = 0;
            config.windows.clear();
        }
        config.stores = {true, static_cast<SavePolicy>(1 + below(3)), 1 + below(3), 1 + below(300),
                         below(20)};
        return config;
    }

    LeaseId any_lease() {
        if (leases_.empty()) match();
        return leases_[below(static_cast<unsigned>(leases_.size()))];
    }

    void match() {
        std::vector<std::int32_t> tokens(1 + below(24));
        for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(below(9) / 8);
        std::vector<Item> items;
        if (below(6) == 0 && tokens.size() > 6) items.push_back({below(2) == 0 ? "a" : "b", 2, 3});
        const char* context = below(5) == 0 ? "salt" : "";
        leases_.push_back(core_.match(tokens, context, below(8) != 0, below(8) != 0, items).lease);
        if (below(8) == 0) core_.compute_nothing(leases_.back(), below(2) == 0);
    }

    // can_allocate() has to forecast the result.
    void allocate() {
        const LeaseId id = any_lease();
        const auto num_tokens = static_cast<std::int64_t>(core_.lease(id).tokens.size()) + below(6);
        const bool forecast = core_.can_allocate(id, num_tokens, false);
        const Grant grant = core_.allocate(id, num_tokens);
        CHECK_EQ(grant != Grant::kNone, forecast);
        if (grant == Grant::kNone) return save(core_.take_write_backs(below(8)));
        const std::vector<TransferId>& onloads = core_.lease(id).onloads;
        transfers_.insert(onloads.begin(), onloads.end());
    }

    void save(TransferId id) {
        if (id != 0) transfers_.insert(id);
    }

    void save_to_stores() {
        const TransferId id = core_.take_saves();
        if (id == 0) return;
        transfers_.insert(id);
        saves_.insert(id);
    }

    void complete() {
        if (transfers_.empty()) return;
        const auto any =
            std::next(transfers_.begin(), below(static_cast<unsigned>(transfers_.size())));
        const TransferId id = *any;
        transfers_.erase(any);
        if (below(4) == 0) core_.mark_cancelling(id);
        const unsigned luck = below(8);
        const Outcome outcome = luck == 0   ? Outcome::kCancelled
                                : luck == 1 ? Outcome::kFailed
                                            : Outcome::kDone;
        std::vector<std::uint8_t> results;
        if (saves_.erase(id) > 0 && below(2) == 0) {
            for (std::size_t i = 0; i < core_.store_transfer(id).host_blocks.size(); ++i) {
                results.push_back(static_cast<std::uint8_t>(below(5)));
            }
        }
        core_.complete(id, outcome, below(5), results);
    }

    void end_batch() {
        if (batches_.empty()) return;
        const auto any = batches_.begin() + below(static_cast<unsigned>(batches_.size()));
        const BatchId batch = *any;
        batches_.erase(any);
        core_.end_batch(batch, below(2) == 0 ? step_ : 0);
    }

    void release() {
        const LeaseId id = any_lease();
        std::erase(leases_, id);
        core_.release(id, below(2) == 0 ? step_ : 0, below(4) == 0 ? step_ : 0);
    }

    void swap_out() {
        const LeaseId id = any_lease();
        core_.swap_out(id, step_);
        save(core_.lease(id).swap_transfer);
    }

    void snapshot() {
        const LeaseId id = any_lease();
        const StateCopy copy = core_.snapshot(id, core_.lease(id).computed_tokens, step_);
        if (copy.target != kNoBlock && below(6) == 0) core_.discard_snapshot(id, copy.target);
    }

    void fork() {
        const Fork fork = core_.fork(any_lease(), step_);
        if (fork.lease != 0) leases_.push_back(fork.lease);
    }

    void change_tiers() {
        const unsigned kind = below(10);
        if (kind == 0) return core_.reset();
        if (kind == 1) return core_.forget_device();
        if (kind == 2) return core_.forget_host();
        core_.resize_device(6 + below(44));
    }

    void pass_step() {
        if (below(2) == 0) core_.close_step(step_);
        if (below(2) == 0) core_.finish_step(step_);
        ++step_;
    }

    // Each block that can be matched is in one stretch, which comes after its parent.
    void check_hot_prefixes() {
        const auto [prefixes, complete] = core_.hottest_prefixes(10'000);
        CHECK(complete);
        std::size_t blocks = 0;
        for (std::size_t i = 0; i < prefixes.size(); ++i) {
            const HotPrefix& prefix = prefixes[i];
            blocks += prefix.blocks;
            if (prefix.parent == HotPrefix::kNoParent) continue;
            CHECK(prefix.parent < i);
            const HotPrefix& parent = prefixes[prefix.parent];
            CHECK_EQ(prefix.first_block, parent.first_block + parent.blocks);
        }
        CHECK_EQ(blocks, core_.blocks().size());
    }

    void call(unsigned kind) {
        switch (kind) {
            case 0:
            case 1:
            case 2:
                return match();
            case 3:
            case 4:
            case 5:
                return allocate();
            case 6:
            case 7: {
                const LeaseId id = any_lease();
                const Lease& lease = core_.lease(id);
                const std::int64_t more = lease.computed_tokens + below(8);
                core_.commit(id, std::min<std::int64_t>(lease.num_tokens, more), step_);
                return;
            }
            case 8:
                return release();
            case 9:
                core_.retract(any_lease(), step_);
                return;
            case 10: {
                const LeaseId id = any_lease();
                const std::int64_t num_tokens = core_.lease(id).num_tokens;
                core_.truncate(id, num_tokens - below(6), step_);
                return;
            }
            case 11: {
                const LeaseId id = any_lease();
                core_.extend({&id, 1}, below(5));
                const std::vector<std::int32_t> tokens(below(4), 1);
                return core_.append(id, tokens);
            }
            case 12: {
                const LeaseId id = any_lease();
                batches_.push_back(core_.begin_batch({&id, 1}));
                return;
            }
            case 13:
                return end_batch();
            case 14:
                return save(below(2) == 0 ? core_.take_backups()
                                          : core_.take_write_backs(below(8)));
            case 15:
                return complete();
            case 16:
                return swap_out();
            case 17:
                return below(2) == 0 ? fork() : snapshot();
            case 18:
                core_.await_use(any_lease());
                core_.take_used();
                core_.take_abandoned();
                core_.recompute_from(any_lease());
                return;
            case 19: {
                const TransferId late = transfers_.empty() ? 0 : *transfers_.begin();
                return save(core_.begin_fetch(any_lease(), 1 + below(8), below(2) == 0 ? late : 0));
            }
            case 20:
                return save_to_stores();
            default:
                pass_step();
                if (below(8) == 0) change_tiers();
        }
    }

    std::mt19937 random_;
    Core core_;
    std::vector<LeaseId> leases_;
    std::vector<BatchId> batches_;
    std::set<TransferId> transfers_;
    std::set<TransferId> saves_;  // of transfers_: those to stores
    Step step_ = 1;
};

}  // namespace

TEST(invariants_hold_after_random_calls) {
    for (unsigned seed = 0; seed < 200 && check::failures() == 0; ++seed) {
        Walk walk(seed);
        for (int step = 0; step < 300 && check::failures() == 0; ++step) walk.step();
        if (check::failures() == 0) walk.finish();
        if (check::failures() > 0) check::fail("seed", static_cast<int>(seed), "of this walk");
    }
}
