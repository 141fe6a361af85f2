// The policy "adaptive": each tier evicts by recency or by the scores of a reuse model.
#include <algorithm>
#include <optional>
#include <span>
#include <string_view>

#include "aiokv/core_types.hpp"
#include "aiokv/eviction_order.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/ranked_queue.hpp"
#include "aiokv/reuse_labels.hpp"
#include "aiokv/reuse_model.hpp"
#include "aiokv/set_dueling.hpp"

namespace aiokv {
namespace {

// The host evicts blocks that leave both tiers, so its order is that of one tier with the capacity
// of both.
std::uint32_t capacity_of_host_order(const CoreConfig& config) {
    return config.host_blocks + (config.external_device ? 0 : config.device_blocks);
}

class AdaptiveOrder final : public EvictionOrder {
  public:
    AdaptiveOrder(const CoreConfig& config, PrefixTree& tree)
        : host_blocks_(config.host_blocks),
          model_(config.block_tokens, capacity_of_host_order(config)),
          device_dueling_(model_, config.device_blocks),
          device_(tree, &model_),
          host_(tree, &model_) {
        if (config.host_blocks > 0) host_dueling_.emplace(model_, capacity_of_host_order(config));
    }

    TierQueue& device() override { return device_; }
    TierQueue& host() override { return host_; }
    std::size_t bytes() const override {
        return model_.bytes() + device_.bytes() + host_.bytes() + device_dueling_.bytes() +
               (host_dueling_ ? host_dueling_->bytes() : 0);
    }

    bool has_classes() const override { return true; }
    // The model sees the prompt of each lease once.
    bool on_grant(Lease& lease, std::uint64_t seed) override {
        bool device_changed = false;
        if (lease.classes.empty()) {
            model_.observe(lease.tokens, seed, lease.classes);
            lease.stretch_shift = model_.stretch_shift();
            device_dueling_.observe(lease.classes);
            device_changed = device_.choose(device_dueling_.preferred());
            if (host_dueling_) {
                host_dueling_->observe(lease.classes);
                host_.choose(host_dueling_->preferred());
            }
        }
        return device_changed;
    }
    void on_label(Lease& lease, std::uint64_t seed, std::string_view text) override {
        if (lease.classes.empty()) return;
        const std::size_t prompt = std::min<std::size_t>(lease.tokens.size(), lease.prompt_tokens);
        model_.label(std::span(lease.tokens).first(prompt), seed, labels_.id_of(text),
                     lease.classes);
        device_dueling_.label(lease.classes);
        if (host_dueling_) host_dueling_->label(lease.classes);
    }
    void on_device_resized(std::uint32_t blocks) override {
        device_dueling_.resize(blocks);
        if (host_dueling_) host_dueling_->resize(host_blocks_ + blocks);
    }

  private:
    const std::uint32_t host_blocks_;
    ReuseModel model_;
    ReuseLabels labels_;
    SetDueling device_dueling_;
    std::optional<SetDueling> host_dueling_;
    RankedQueue device_;
    RankedQueue host_;
};

}  // namespace

std::unique_ptr<EvictionOrder> make_adaptive_order(const CoreConfig& config, PrefixTree& tree) {
    return std::make_unique<AdaptiveOrder>(config, tree);
}

}  // namespace aiokv
