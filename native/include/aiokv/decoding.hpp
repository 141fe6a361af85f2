// A step of a batch: names the tokens that the model has produced, commits the positions before the
// last one, and gives each lease the positions of the next step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/core_types.hpp"
#include "aiokv/external_blocks.hpp"
#include "aiokv/grants.hpp"
#include "aiokv/lease_table.hpp"
#include "aiokv/peer_transfers.hpp"
#include "aiokv/publication.hpp"

namespace aiokv {

// Tokens of a step, a row per lease.
struct StepTokens {
    Tokens tokens;  // rows of `width` tokens
    std::size_t width = 1;
    std::span<const std::int32_t> counts;  // number of valid tokens per row; empty: all are valid

    Tokens row(std::size_t row) const {
        const std::size_t count = counts.empty() ? width : static_cast<std::size_t>(counts[row]);
        return tokens.subspan(row * width, count);
    }
};

// Changes of a step. Rows are indices in the list of leases.
struct Advanced {
    std::uint32_t published = 0;         // blocks that became matchable
    std::vector<std::uint32_t> refused;  // rows for which there was no room
    std::vector<std::uint32_t> grown;    // rows that got blocks
    std::vector<BlockId> computed;       // device blocks that are complete now
};

class Decoding {
  public:
    Decoding(const CoreConfig& config, LeaseTable& leases, PeerTransfers& peers,
             ExternalBlocks& external, Publication& publication, Grants& grants)
        : config_(config),
          leases_(leases),
          peers_(peers),
          external_(external),
          publication_(publication),
          grants_(grants) {}

    // Names the tokens of each lease behind those that it has, commits all positions before the
    // last token, and gives the lease `draft_tokens` positions behind that token. Skips released
    // leases, and rows without tokens. When not all leases fit, earlier rows go first; a refused
    // lease is unchanged. Throws before any change: UsageError for a wrong token or count,
    // LeaseError for a lease that cannot take its tokens or is listed twice.
    Advanced advance(std::span<const LeaseId> ids, const StepTokens& step_tokens,
                     std::int64_t draft_tokens, Step step);

  private:
    struct Row {
        Growth growth;
        std::uint32_t index;
        Tokens tokens;
    };

    std::vector<Row> check(std::span<const LeaseId> ids, const StepTokens& step_tokens,
                           std::int64_t draft_tokens);
    // Gives the rows their positions. Removes rows for which there is no room.
    void grow(std::vector<Row>& rows, Advanced& advanced);
    void apply(const Row& row, Step step, Advanced& advanced);

    const CoreConfig& config_;
    LeaseTable& leases_;
    PeerTransfers& peers_;
    ExternalBlocks& external_;
    Publication& publication_;
    Grants& grants_;
};

}  // namespace aiokv
