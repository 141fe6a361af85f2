// The table of eviction policies.
#include <algorithm>
#include <array>

#include "aiokv/core_types.hpp"
#include "aiokv/error.hpp"
#include "aiokv/eviction_order.hpp"

namespace aiokv {

// Each function is defined in the file of its policy.
std::unique_ptr<EvictionOrder> make_lru_order(const CoreConfig& config, PrefixTree& tree);
std::unique_ptr<EvictionOrder> make_adaptive_order(const CoreConfig& config, PrefixTree& tree);

namespace {

struct Policy {
    std::string_view name;
    std::unique_ptr<EvictionOrder> (*make)(const CoreConfig& config, PrefixTree& tree);
};

constexpr std::array kPolicies{
    Policy{"lru", make_lru_order},
    Policy{"adaptive", make_adaptive_order},
};

constexpr auto kNames = [] {
    std::array<std::string_view, kPolicies.size()> names;
    std::ranges::transform(kPolicies, names.begin(), &Policy::name);
    return names;
}();

}  // namespace

std::span<const std::string_view> eviction_policies() {
    return kNames;
}

std::unique_ptr<EvictionOrder> make_eviction_order(const CoreConfig& config, PrefixTree& tree) {
    const auto* policy = std::ranges::find(kPolicies, config.eviction, &Policy::name);
    if (policy == kPolicies.end()) {
        throw ConfigError("eviction is '" + config.eviction + "', which is no eviction policy");
    }
    return policy->make(config, tree);
}

}  // namespace aiokv
