// Numbers of keys by label: of the model, of the version of its weights, and of the salt.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/digest.hpp"

namespace aiokv {

class LabelCounts {
  public:
    struct Place {
        const char* kind;
        std::size_t at;
        std::size_t bytes;
    };
    static constexpr std::array<Place, 3> kPlaces = {Place{"model", 21, 3}, Place{"version", 24, 3},
                                                     Place{"salt", 27, kSaltLabelBytes}};

    // Labels of a kind that are counted. With more, the smaller half is forgotten, so the counts of
    // small labels may then be too low.
    static constexpr std::size_t kMaxLabels = 4096;

    void add(const Digest& key) {
        for (std::size_t i = 0; i < kPlaces.size(); ++i) {
            Counts& counts = counts_[i];
            ++counts[label(key, kPlaces[i])];
            if (counts.size() <= kMaxLabels) continue;
            const auto kept = largest(i, kMaxLabels / 2);
            counts = Counts(kept.begin(), kept.end());
        }
    }
    void remove(const Digest& key) {
        for (std::size_t i = 0; i < kPlaces.size(); ++i) {
            const auto found = counts_[i].find(label(key, kPlaces[i]));
            if (found != counts_[i].end() && --found->second == 0) counts_[i].erase(found);
        }
    }
    // Returns the labels of a kind with the most keys, at most `count`, in no order.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> largest(std::size_t kind,
                                                                 std::size_t count) const {
        std::vector<std::pair<std::uint64_t, std::uint64_t>> all(counts_[kind].begin(),
                                                                 counts_[kind].end());
        count = std::min(count, all.size());
        const auto is_larger = [](const auto& a, const auto& b) {
            return a.second != b.second ? a.second > b.second : a.first < b.first;
        };
        std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end(),
                         is_larger);
        all.resize(count);
        return all;
    }

  private:
    using Counts = std::unordered_map<std::uint64_t, std::uint64_t>;

    static std::uint64_t label(const Digest& key, const Place& place) {
        std::uint64_t number = 0;
        for (std::size_t i = 0; i < place.bytes; ++i) number = number << 8 | key[place.at + i];
        return number;
    }

    std::array<Counts, kPlaces.size()> counts_;
};

}  // namespace aiokv
