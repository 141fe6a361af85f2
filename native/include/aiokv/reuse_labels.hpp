// The labels that clients gave to ended requests, and their numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "aiokv/return_rates.hpp"

namespace aiokv {

class ReuseLabels {
  public:
    // Returns the number of a label. The first kMost labels have numbers of their own; all later
    // ones share one.
    std::uint32_t id_of(std::string_view label) {
        const auto found = std::ranges::find(labels_, label);
        const auto id = static_cast<std::uint32_t>(found - labels_.begin()) + 1;
        if (found == labels_.end() && labels_.size() < kMost) labels_.emplace_back(label);
        return id;
    }

  private:
    static constexpr std::size_t kMost = ReuseFeatures::kLabels - 2;  // without none and others

    std::vector<std::string> labels_;
};

}  // namespace aiokv
