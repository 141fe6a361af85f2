// A sketch of the digests that were offered recently: which of them were offered before.
//
// Four counters of 8 bits per digest, among counters that all digests share. A digest that was not
// offered before may be taken for one that was, with a probability of a few percent at most. All
// counters are halved after each period, so that a digest is forgotten one to two periods after
// its first offer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aiokv/digest.hpp"

namespace aiokv {

class ReuseSketch {
  public:
    // `period`: offers, of which all are remembered. `most`: offers of one digest that are counted,
    // at most 127.
    explicit ReuseSketch(std::uint64_t period, std::uint32_t most = 8);

    // Counts an offer. Returns true when the digest was offered before.
    bool offer(const Digest& digest) { return count(digest) > 0; }
    // Counts an offer. Returns how many came before it, as far as they are counted and remembered.
    std::uint32_t count(const Digest& digest);

    std::size_t bytes() const { return counters_.size(); }

  private:
    void age();

    std::uint64_t period_;
    std::uint8_t most_;
    std::uint64_t offers_ = 0;            // in this period
    std::vector<std::uint8_t> counters_;  // a power of two of them
};

}  // namespace aiokv
