// A sketch of the digests that were offered recently: it tells which of them were offered before.
//
// Each digest has four counters of 8 bits among counters that all digests share. With a probability
// of a few percent at most, a new digest appears to have been offered before. All counters are
// halved after each period, so that a digest is forgotten one to two periods after its first offer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/digest.hpp"

namespace aiokv {

class ReuseSketch {
  public:
    // `period`: number of latest offers that are certainly remembered. `most`: largest count per
    // digest, at most 127.
    explicit ReuseSketch(std::uint64_t period, std::uint32_t most = 8);

    // Counts an offer. Returns true when the digest was offered before.
    bool offer(const Digest& digest) { return count(digest) > 0; }
    // Counts an offer. Returns the number of earlier offers of the digest, up to `most`, that are
    // remembered.
    std::uint32_t count(const Digest& digest);

    std::size_t bytes() const { return counters_.size(); }
    // State of the sketch, to restore it in another process.
    std::span<const std::uint8_t> counters() const { return counters_; }
    // Replaces the state by that of a sketch of the same size. Throws UsageError for another size.
    void restore(std::span<const std::uint8_t> counters);

  private:
    void age();

    std::uint64_t period_;
    std::uint8_t most_;
    std::uint64_t offers_ = 0;            // in this period
    std::vector<std::uint8_t> counters_;  // their number is a power of two
};

}  // namespace aiokv
