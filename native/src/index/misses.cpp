#include "aiokv/misses.hpp"

#include <algorithm>
#include <tuple>

namespace aiokv {
namespace {

constexpr std::size_t kOtherContexts = 16;  // contexts that a miss is looked up in
constexpr std::size_t kSiblings = 1024;     // known prefixes that a prompt is compared with
constexpr std::size_t kFewSiblings = 16;    // most prompts begin alike

// Returns true if both have left for the same reason. Blocks of a call may be evicted one by one.
bool continues(const MissedRun& run, const MissedRun& next) {
    const auto reason = [](const MissedRun& of) {
        return std::tuple(of.cause, of.eviction.cause, of.eviction.demand, of.eviction.from_host);
    };
    const bool has_left =
        next.cause == MissCause::kEvicted || next.cause == MissCause::kOtherWeights;
    return has_left && reason(run) == reason(next);
}

}  // namespace

Misses::Place Misses::follow_tree(Place place, const Lease& lease, std::size_t limit) const {
    for (; place.block < limit; ++place.block) {
        const NodeId child = index_.tree().find_child(place.node, tokens_of(lease, place.block),
                                                      key_of(lease.item_keys, place.block));
        if (child == kNone) break;
        place.node = child;
    }
    return place;
}

// Calls visit(first block, end, eviction) for each evicted run that the prompt continues with.
template <class Visit>
Misses::Place Misses::follow_history(Place place, const Lease& lease, std::size_t limit,
                                     Visit visit) const {
    const PrefixTree& tree = index_.tree();
    while (place.block < limit) {
        const auto part =
            tree.find_evicted(place.node, tokens_of(lease, place.block),
                              keys_from(lease.item_keys, place.block), limit - place.block);
        if (part.blocks == 0) break;
        const EvictedRuns::Run& run = tree.evicted()[part.run];
        visit(place.block, place.block + part.blocks, run.eviction);
        place = {run.first + part.blocks - 1, place.block + part.blocks, part.blocks < run.length};
    }
    return place;
}

// Returns the blocks from `first` on that another context has or had.
MissedRun Misses::other_context(const Lease& lease, std::size_t first, std::size_t limit) const {
    MissedRun found{static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(first)};
    found.cause = MissCause::kOtherContext;
    if (index_.num_contexts() == 1) return found;
    index_.for_some_roots(kOtherContexts, [&](NodeId root) {
        if (root == index_.root_of(lease)) return;
        const auto ignore = [](std::size_t, std::size_t, const Eviction&) {};
        const Place end =
            follow_history(follow_tree({root, 0}, lease, limit), lease, limit, ignore);
        if (end.block <= found.end) return;
        found.end = static_cast<std::uint32_t>(end.block);
        found.other_root = root;
    });
    return found;
}

void Misses::explain(Lease& lease, std::size_t limit) {
    lease.missed.clear();
    const PrefixTree& tree = index_.tree();
    if (tree.evicted().limit() == 0) return;
    std::size_t at = lease.path.size();
    const auto note = [&](std::size_t end, MissedRun run) {
        if (end <= at) return;
        run.first = static_cast<std::uint32_t>(at);
        run.end = static_cast<std::uint32_t>(end);
        if (lease.missed.empty() || !continues(lease.missed.back(), run)) {
            lease.missed.push_back(run);
        }
        lease.missed.back().end = run.end;
        tokens_[static_cast<std::size_t>(run.cause)] += (end - at) * config_.block_tokens;
        at = end;
    };
    const NodeId hit_end = at == 0 ? index_.root_of(lease) : lease.path.back();
    Place place = follow_tree({hit_end, at}, lease, limit);
    const bool has_groups = !config_.windows.empty() || config_.state_slots > 0;
    if (!has_groups || lease.stored_blocks < place.block) {  // else only other groups are missing
        note(place.block, {.cause = MissCause::kUnusable});
    }
    if (!promises_.empty()) {
        const Pending pending = promises_.find(place.node, lease, at, limit);
        note(at + pending.blocks, {.cause = MissCause::kPending, .owner = pending.owner});
    }
    note(std::min<std::size_t>(lease.stored_blocks, limit),
         {.cause = MissCause::kInStore, .left = lease.left_in_store});
    lease.stored_blocks = 0;
    place =
        follow_history(place, lease, limit, [&](std::size_t, std::size_t end, const Eviction& e) {
            const bool by_reset = e.cause == EvictionCause::kReset;  // only those with new weights
            note(end, {.cause = by_reset ? MissCause::kOtherWeights : MissCause::kEvicted,
                       .eviction = e});
        });
    if (at < limit) {
        const MissedRun other = other_context(lease, at, limit);
        note(other.end, other);
    }
    MissedRun rest{.known = place.node};
    if (place.block == at && at < limit) {
        if (has_other_items(lease, place)) {
            rest.cause = MissCause::kOtherItems;
        } else if (is_known_end(lease, place)) {
            rest.cause = MissCause::kDiverged;
        }
    }
    note(limit, rest);
}

// Visits the first blocks of the known prefixes behind a block, in the tree and in the history.
template <class Visit>
void Misses::for_some_behind(NodeId known, Visit visit) const {
    const PrefixTree& tree = index_.tree();
    if (tree.is_live(known)) tree.for_some_children(known, kSiblings, visit);
    tree.evicted().for_each([&](const EvictedRuns::Run& run) {
        if (run.parent == known) visit(run.first);
        if (run.contains(known) && run.contains(known + 1)) visit(known + 1);
    });
}

// Returns true if one of the latest known prefixes behind a block continues with these tokens.
bool Misses::continues_with(NodeId known, std::span<const std::int32_t> tokens) const {
    const PrefixTree& tree = index_.tree();
    bool found = false;
    const auto compare = [&](NodeId child) {
        found = found || std::ranges::equal(tokens, std::span(tree.tokens(child), tokens.size()));
    };
    for (const std::size_t children : {kFewSiblings, kSiblings}) {
        if (!found && tree.is_live(known)) tree.for_some_children(known, children, compare);
    }
    const EvictedRuns& evicted = tree.evicted();
    RunId id = evicted.newest();
    for (std::size_t i = 0; i < kSiblings && id != kNoRun && !found; ++i, id = evicted[id].older) {
        const EvictedRuns::Run& run = evicted[id];
        if (run.parent == known) compare(run.first);
        if (run.contains(known) && run.contains(known + 1)) compare(known + 1);
    }
    return found;
}

// Returns true if the tokens of the block at this place are known with other items.
bool Misses::has_other_items(const Lease& lease, Place place) const {
    if (key_of(lease.item_keys, place.block) == kNoItems) return false;
    return continues_with(place.node, {tokens_of(lease, place.block), config_.block_tokens});
}

// Returns true if known prefixes continue behind this place. At the beginning of a prompt, one of
// them must share its first token.
bool Misses::is_known_end(const Lease& lease, Place place) const {
    const PrefixTree& tree = index_.tree();
    if (place.block == 0) {
        const std::span<const std::int32_t> first(tokens_of(lease, 0), 1);
        return tree.evicted().may_begin_with(first[0]) && continues_with(place.node, first);
    }
    const bool is_parent = tree.is_live(place.node) && tree.has_child(place.node);
    return place.is_in_run || is_parent || tree.evicted().is_above(place.node);
}

std::optional<Misses::Divergence> Misses::divergence(const Lease& lease,
                                                     const MissedRun& run) const {
    const PrefixTree& tree = index_.tree();
    const std::size_t block_tokens = config_.block_tokens;
    const NodeId known = run.known;
    bool is_kept = tree.is_live(known);
    tree.evicted().for_each(
        [&](const EvictedRuns::Run& evicted) { is_kept = is_kept || evicted.contains(known); });
    if (!is_kept ||
        (run.first > 0 && !std::equal(tree.tokens(known), tree.tokens(known) + block_tokens,
                                      tokens_of(lease, run.first - 1)))) {
        return std::nullopt;  // its slot has another block now
    }
    const std::int32_t* prompt = tokens_of(lease, run.first);
    std::size_t longest = 0;
    NodeId closest = kNone;
    const auto compare = [&](NodeId child) {
        const auto same = static_cast<std::size_t>(
            std::mismatch(prompt, prompt + block_tokens, tree.tokens(child)).first - prompt);
        if (same == block_tokens || (closest != kNone && same <= longest)) return;
        longest = same;
        closest = child;
    };
    for_some_behind(known, compare);
    if (closest == kNone || (run.first == 0 && longest == 0)) return std::nullopt;
    return Divergence{static_cast<std::uint32_t>(run.first * block_tokens + longest),
                      prompt[longest], tree.tokens(closest)[longest]};
}

}  // namespace aiokv
