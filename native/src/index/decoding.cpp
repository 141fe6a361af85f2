#include "aiokv/decoding.hpp"

#include <algorithm>
#include <string>

#include "aiokv/error.hpp"
#include "core_detail.hpp"

namespace aiokv {
namespace {

void check_shape(std::size_t leases, const StepTokens& step_tokens, std::int64_t draft_tokens) {
    const auto& [tokens, width, counts] = step_tokens;
    if (tokens.size() != leases * width) {
        throw UsageError("advance: " + str(tokens.size()) + " tokens in rows of " + str(width) +
                         "; the batch has " + str(leases) + " leases");
    }
    if (!counts.empty() && counts.size() != leases) {
        throw UsageError("advance: counts has " + str(counts.size()) + " numbers; the batch has " +
                         str(leases) + " leases");
    }
    if (draft_tokens < 0 || draft_tokens > kMaxTokens) {
        throw UsageError("advance: draft_tokens is " + std::to_string(draft_tokens) +
                         "; it must be between 0 and " + std::to_string(kMaxTokens));
    }
}

void check_count(std::int32_t count, std::size_t width, LeaseId id) {
    if (count >= 0 && static_cast<std::size_t>(count) <= width) return;
    throw UsageError("advance: the count of a lease is " + std::to_string(count) +
                     "; it must be between 0 and the " + str(width) + " tokens of a row")
        .of(id);
}

void check_tokens(Tokens tokens, LeaseId id) {
    const auto wrong =
        std::find_if(tokens.begin(), tokens.end(), [](std::int32_t token) { return token < 0; });
    if (wrong == tokens.end()) return;
    throw UsageError("advance: a token of a lease is " + std::to_string(*wrong) +
                     "; generated tokens are at least 0")
        .of(id)
        .hint("pass the number of tokens per lease as counts, and leave padding out of it");
}

}  // namespace

std::vector<Decoding::Row> Decoding::check(std::span<const LeaseId> ids,
                                           const StepTokens& step_tokens,
                                           std::int64_t draft_tokens) {
    check_shape(ids.size(), step_tokens, draft_tokens);
    leases_.require_distinct(ids, "advance");
    std::vector<Row> rows;
    rows.reserve(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (!leases_.is_held(ids[i])) continue;
        Lease& lease = leases_.at(ids[i]);
        if (!step_tokens.counts.empty())
            check_count(step_tokens.counts[i], step_tokens.width, ids[i]);
        const Tokens tokens = step_tokens.row(i);
        if (tokens.empty()) continue;
        check_tokens(tokens, ids[i]);
        const std::size_t named = lease.tokens.size() + tokens.size();
        const std::size_t wanted = named + static_cast<std::size_t>(draft_tokens);
        const std::size_t more = wanted - std::min<std::size_t>(wanted, lease.num_tokens);
        grants_.check_grow(lease, "advance", more);
        if (named - 1 > lease.num_tokens) {
            throw LeaseError("advance: " + str(tokens.size()) + " tokens behind position " +
                             str(lease.tokens.size()) + " of a lease that has " +
                             str(lease.num_tokens) +
                             " positions; all tokens but the last must "
                             "have been computed")
                .of(ids[i])
                .hint(external_.exist() ? "call assign first"
                                        : "pass draft_tokens to the advance before, or call "
                                          "extend before the step");
        }
        const auto computed = static_cast<std::int64_t>(named) - 1;
        peers_.check_commit(lease, computed);
        publication_.check_commit(lease, "advance", computed);
        // With external blocks, the server names the blocks of new positions itself.
        const std::size_t grown = external_.exist() ? lease.num_tokens : lease.num_tokens + more;
        rows.push_back(
            {{&lease, static_cast<std::uint32_t>(grown)}, static_cast<std::uint32_t>(i), tokens});
    }
    return rows;
}

void Decoding::grow(std::vector<Row>& rows, Advanced& advanced) {
    std::vector<Growth> growths;
    for (const Row& row : rows) {
        if (row.growth.num_tokens > row.growth.lease->num_tokens) growths.push_back(row.growth);
    }
    for (const Row& row : rows) {
        const Lease& lease = *row.growth.lease;
        if (config_.blocks_for(row.growth.num_tokens) > lease.table.size()) {
            advanced.grown.push_back(row.index);
        }
    }
    if (growths.empty() || grants_.grow(growths)) return;
    std::erase_if(rows, [&](const Row& row) {
        if (row.growth.num_tokens <= row.growth.lease->num_tokens) return false;
        if (grants_.grow(std::span(&row.growth, 1))) return false;
        advanced.refused.push_back(row.index);
        std::erase(advanced.grown, row.index);
        return true;
    });
}

void Decoding::apply(const Row& row, Step step, Advanced& advanced) {
    Lease& lease = *row.growth.lease;
    const auto computed = static_cast<std::uint32_t>(lease.tokens.size() + row.tokens.size() - 1);
    const std::size_t first = lease.computed_tokens / config_.block_tokens;
    publication_.append(lease, row.tokens, {});
    advanced.published += publication_.commit(lease, computed, step);
    for (std::size_t i = first; i < computed / config_.block_tokens; ++i) {
        advanced.computed.push_back(lease.table[i]);
    }
}

Advanced Decoding::advance(std::span<const LeaseId> ids, const StepTokens& step_tokens,
                           std::int64_t draft_tokens, Step step) {
    std::vector<Row> rows = check(ids, step_tokens, draft_tokens);
    Advanced advanced;
    grow(rows, advanced);
    for (const Row& row : rows) apply(row, step, advanced);
    return advanced;
}

}  // namespace aiokv
