// The policy "lru": the least recently used block is evicted first.
#include "aiokv/eviction_order.hpp"
#include "aiokv/prefix_tree.hpp"
#include "aiokv/ranked_queue.hpp"

namespace aiokv {
namespace {

class LruOrder final : public EvictionOrder {
  public:
    explicit LruOrder(PrefixTree& tree) : device_(tree, nullptr), host_(tree, nullptr) {}

    TierQueue& device() override { return device_; }
    TierQueue& host() override { return host_; }
    std::size_t bytes() const override { return device_.bytes() + host_.bytes(); }

  private:
    RankedQueue device_;
    RankedQueue host_;
};

}  // namespace

std::unique_ptr<EvictionOrder> make_lru_order(const CoreConfig& /*config*/, PrefixTree& tree) {
    return std::make_unique<LruOrder>(tree);
}

}  // namespace aiokv
