// Violated invariants, and the owners that the components declare while they are checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aiokv/block_pool.hpp"
#include "aiokv/node.hpp"

namespace aiokv {

// Collects sentences. A check that holds creates no string.
class Findings {
  public:
    template <class... Parts>
    void require(bool holds, const Parts&... parts) {
        if (holds) return;
        std::ostringstream text;
        (text << ... << parts);
        lines_.push_back(text.str());
    }
    std::vector<std::string> take() { return std::move(lines_); }

  private:
    std::vector<std::string> lines_;
};

// Counts the owners of each id of one pool (I1).
class Ownership {
  public:
    Ownership(Findings& findings, const char* tier, std::uint32_t capacity)
        : findings_(findings), tier_(tier), owners_(capacity, 0) {}

    const char* tier() const { return tier_; }
    void own(BlockId id, const char* owner) {
        const bool valid = id >= 0 && static_cast<std::size_t>(id) < owners_.size();
        findings_.require(valid, "I1: ", tier_, " id ", id, " of ", owner, " is outside the pool");
        if (valid) ++owners_[static_cast<std::size_t>(id)];
    }
    template <class IsFree>
    void check(IsFree is_free) const {
        for (std::size_t id = 0; id < owners_.size(); ++id) {
            const int owners = owners_[id] + is_free(static_cast<BlockId>(id));
            findings_.require(owners == 1, "I1: ", tier_, " id ", id, " has ", owners, " owners");
        }
    }

  private:
    Findings& findings_;
    const char* tier_;
    std::vector<int> owners_;
};

// One check of all components. The owners of blocks, refs, holds and pins declare them first. The
// residency, which counts them per node and per id, is checked last and compares.
class Report {
  public:
    Report(std::uint32_t device_blocks, std::uint32_t host_blocks, std::size_t node_slots)
        : device(findings_, "device", device_blocks),
          host(findings_, "host", host_blocks),
          refs(node_slots, 0),
          holds(node_slots, 0),
          pins(node_slots, 0) {}

    template <class... Parts>
    void require(bool holds, const Parts&... parts) {
        findings_.require(holds, parts...);
    }
    Ownership pool(const char* tier, std::uint32_t capacity) {
        return Ownership(findings_, tier, capacity);
    }
    std::vector<std::string> take() { return findings_.take(); }

  private:
    Findings findings_;

  public:
    Ownership device;
    Ownership host;
    std::vector<std::uint32_t> refs;   // by node
    std::vector<std::uint32_t> holds;  // by node
    std::vector<std::uint32_t> pins;   // by node
    std::uint64_t item_refs = 0;       // refs on item keys that fetches and external saves hold
    std::unordered_map<std::uint32_t, std::uint32_t> growths;  // by context
};

}  // namespace aiokv
