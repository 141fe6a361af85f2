#include "aiokv/block_events.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "aiokv/error.hpp"
#include "core_detail.hpp"
#include "report.hpp"

namespace aiokv {
namespace {

constexpr std::size_t kRunBlocks = 256;        // most blocks per event
constexpr std::size_t kSweepNodes = 1 << 14;   // most nodes per drain()
constexpr std::size_t kMaxInStores = 1 << 20;  // besides the blocks of the tiers; 48 bytes each
constexpr Medium kMedia[] = {Medium::kDevice, Medium::kHost, Medium::kStore};

std::uint8_t bit_of(Medium medium) {
    return static_cast<std::uint8_t>(1 << static_cast<std::uint8_t>(medium));
}

const std::uint8_t kTiers = bit_of(Medium::kDevice) | bit_of(Medium::kHost);
const std::uint8_t kStores = bit_of(Medium::kStore);

std::uint64_t beginning_of(const Digest& digest) {
    std::uint64_t beginning;
    std::memcpy(&beginning, digest.data(), sizeof(beginning));
    return beginning;
}

}  // namespace

void BlockEvents::Stream::begin_sweep(NodeId end) {
    for (std::uint8_t& bits : reported) bits = static_cast<std::uint8_t>(bits & ~kSwept);
    reported.resize(std::max<std::size_t>(reported.size(), end), 0);
    sweeps = true;
    next = 0;
}

void BlockEvents::Stream::clear() {
    queue.clear();
    queued_blocks = 0;
    in_stores.clear();
    std::fill(reported.begin(), reported.end(), std::uint8_t{0});
    BlockRun cleared;
    cleared.event = BlockEvent::kCleared;
    queue.push_back(std::move(cleared));
}

EventStreamId BlockEvents::open(std::size_t max_blocks, bool with_stores) {
    Stream stream;
    stream.max_blocks = std::max<std::size_t>(max_blocks, 1);
    stream.media = static_cast<std::uint8_t>(kTiers | (with_stores ? kStores : 0));
    has_stores_ |= with_stores;
    stream.begin_sweep(tree_.end_id());
    streams_.emplace(++last_id_, std::move(stream));
    return last_id_;
}

void BlockEvents::close(EventStreamId id) {
    streams_.erase(id);
    has_stores_ = std::any_of(streams_.begin(), streams_.end(), [](const auto& entry) {
        return (entry.second.media & kStores) != 0;
    });
    if (streams_.empty()) std::vector<NodeId>().swap(roots_);
}

void BlockEvents::repeat(EventStreamId id) {
    Stream& one = stream(id);
    if (one.sweeps) {
        one.sweeps_again = true;
    } else {
        one.begin_sweep(tree_.end_id());
    }
}

const BlockEvents::Stream& BlockEvents::stream(EventStreamId id) const {
    const auto found = streams_.find(id);
    if (found == streams_.end()) throw UsageError("no event stream " + str(id) + " is open");
    return found->second;
}

BlockEvents::Stream& BlockEvents::stream(EventStreamId id) {
    return const_cast<Stream&>(std::as_const(*this).stream(id));
}

bool BlockEvents::is_due(EventStreamId id) const {
    const Stream& one = stream(id);
    return one.sweeps || !one.queue.empty();
}

// Returns the tiers in which the block can be matched now, and whether a store has it, too: no bit
// for a block that no tier has.
std::uint8_t BlockEvents::visible(const Stream& stream, NodeId node) const {
    const Node& n = tree_[node];
    if (n.has(kDetached | kRoot) || !n.has(kDeviceValid | kHostValid)) return 0;
    const int media = (n.has(kDeviceValid) ? bit_of(Medium::kDevice) : 0) |
                      (n.has(kHostValid) ? bit_of(Medium::kHost) : 0) |
                      (stored_.has(node, kStored) ? bit_of(Medium::kStore) : 0);
    return static_cast<std::uint8_t>(media & stream.media);
}

void BlockEvents::clear() {
    for (auto& [id, stream] : streams_) {
        stream.clear();
        stream.sweeps = stream.sweeps_again = false;
    }
}

void BlockEvents::note_purge() {
    for (auto& [id, stream] : streams_) {
        if ((stream.media & kStores) != 0) stream.restart(tree_.end_id());
    }
}

void BlockEvents::note_lacking(const Digest& digest) {
    for (auto& [id, stream] : streams_) {
        if (stream.in_stores.erase(beginning_of(digest)) != 0) {
            add_removed(stream, digest, kStores);
            restart_if_full(stream);
        }
    }
}

void BlockEvents::report_change(NodeId node) {
    for (auto& [id, stream] : streams_) {
        const std::uint8_t now = visible(stream, node);
        std::uint8_t& bits = stream.of(node);
        const auto before = static_cast<std::uint8_t>(bits & ~kSwept);
        const auto lost = static_cast<std::uint8_t>(before & ~now);
        const auto gained = static_cast<std::uint8_t>(now & ~before);
        bits = now == 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(bits & ~lost);
        // The digest is known since the block was reported.
        if ((lost & kTiers) != 0) add_removed(stream, stored_.digest(node), lost & kTiers);
        if (gained != 0 && (!stream.sweeps || (bits & kSwept) != 0)) {
            bits = static_cast<std::uint8_t>(bits | gained);
            add_stored(stream, node, gained);
        } else if (gained != 0 && node < stream.next) {
            report_stored(stream, node);
        }
        restart_if_full(stream);
    }
}

// Notes the root of a block from that of its parent, which was reported before it. Walking up to
// the root would cost time per block of the prompt.
NodeId BlockEvents::note_root(NodeId node) {
    const NodeId parent = tree_.parent(node);
    if (node >= roots_.size()) roots_.resize(std::size_t{node} * 5 / 4 + 64, kNone);
    roots_[node] = tree_[parent].has(kRoot) ? parent : roots_[parent];
    return roots_[node];
}

// Reports the block, and before it those of its prompt that the sweep has not reached.
void BlockEvents::report_stored(Stream& stream, NodeId node) {
    unswept_.clear();
    for (NodeId up = node; !tree_[up].has(kRoot) && (stream.of(up) & kSwept) == 0;
         up = tree_.parent(up)) {
        unswept_.push_back(up);
    }
    for (std::size_t i = unswept_.size(); i-- > 0;) {
        const std::uint8_t media = visible(stream, unswept_[i]);
        stream.of(unswept_[i]) = static_cast<std::uint8_t>(media | kSwept);
        add_stored(stream, unswept_[i], media);
    }
}

// Returns the last run of this event and medium if `takes` accepts another block for it; null if a
// new run is needed. Most blocks are on several media, and a run of a tier may come before those of
// other media, so the last run of each medium is checked. A store is reported after the tiers.
template <class Takes>
BlockRun* BlockEvents::open_run(Stream& stream, BlockEvent event, Medium medium, Takes takes) {
    const std::size_t most = medium == Medium::kStore ? 1 : std::size(kMedia);
    for (std::size_t i = 1; i <= std::min(stream.queue.size(), most); ++i) {
        BlockRun& run = stream.queue[stream.queue.size() - i];
        if (run.event != event) return nullptr;
        if (run.medium != medium) continue;
        return run.digests.size() < kRunBlocks && takes(run) ? &run : nullptr;
    }
    return nullptr;
}

void BlockEvents::add_stored(Stream& stream, NodeId node, std::uint8_t media) {
    const Digest digest = stored_.digest(node);
    const NodeId parent = tree_.parent(node);
    const bool has_parent = !tree_[parent].has(kRoot);
    const NodeId root = note_root(node);
    const ItemKey key = tree_.items(node);
    const std::int32_t* tokens = tree_.tokens(node);
    for (const Medium medium : kMedia) {
        if ((media & bit_of(medium)) == 0) continue;
        BlockRun* run = open_run(stream, BlockEvent::kStored, medium, [&](const BlockRun& last) {
            return has_parent && last.digests.back() == stored_.digest(parent);
        });
        if (run == nullptr) {
            run = &stream.queue.emplace_back();
            run->medium = medium;
            run->has_parent = has_parent;
            if (has_parent) run->parent = stored_.digest(parent);
            run->context = index_.context_of_root(root);
        }
        if (medium == Medium::kStore) stream.in_stores.insert(beginning_of(digest));
        run->digests.push_back(digest);
        run->tokens.insert(run->tokens.end(), tokens, tokens + config_.block_tokens);
        if (key != kNoItems || !run->items.empty()) {
            run->items.resize(run->digests.size());
            if (key != kNoItems) run->items.back() = tree_.item_keys().bytes(key);
        }
        ++stream.queued_blocks;
    }
}

void BlockEvents::add_removed(Stream& stream, const Digest& digest, std::uint8_t media) {
    for (const Medium medium : kMedia) {
        if ((media & bit_of(medium)) == 0) continue;
        BlockRun* run =
            open_run(stream, BlockEvent::kRemoved, medium, [](const BlockRun&) { return true; });
        if (run == nullptr) {
            run = &stream.queue.emplace_back();
            run->event = BlockEvent::kRemoved;
            run->medium = medium;
        }
        run->digests.push_back(digest);
        ++stream.queued_blocks;
    }
}

void BlockEvents::restart_if_full(Stream& stream) {
    if (stream.in_stores.size() > kMaxInStores + tree_.end_id()) stream.restart(tree_.end_id());
    if (stream.queued_blocks <= stream.max_blocks) return;
    stream.counts.dropped_blocks += stream.queued_blocks;
    ++stream.counts.restarts;
    stream.restart(tree_.end_id());
}

void BlockEvents::sweep(Stream& stream, std::size_t max_blocks) {
    const NodeId end =
        std::min<NodeId>(tree_.end_id(), static_cast<NodeId>(stream.next + kSweepNodes));
    while (stream.next < end && stream.queued_blocks < max_blocks) {
        const NodeId node = stream.next++;
        if (!tree_.is_live(node) || (stream.of(node) & kSwept) != 0) continue;
        if (visible(stream, node) != 0) report_stored(stream, node);
    }
    stream.sweeps = stream.next < tree_.end_id();
    if (stream.sweeps || !stream.sweeps_again) return;
    stream.sweeps_again = false;
    stream.begin_sweep(tree_.end_id());
}

std::vector<BlockRun> BlockEvents::drain(EventStreamId id, std::size_t max_blocks) {
    Stream& one = stream(id);
    const bool sweeps = one.sweeps && one.queued_blocks < max_blocks;
    if (sweeps) sweep(one, max_blocks);
    std::vector<BlockRun> runs;
    std::size_t blocks = 0;
    // A sweep may have added a long prompt. Take all of it, so that it cannot fill the queue.
    while (!one.queue.empty() && (runs.empty() || sweeps || blocks < max_blocks)) {
        blocks += one.queue.front().digests.size();
        runs.push_back(std::move(one.queue.front()));
        one.queue.pop_front();
    }
    one.queued_blocks -= blocks;
    return runs;
}

void BlockEvents::check(Report& report) const {
    for (const auto& [id, stream] : streams_) {
        std::size_t blocks = 0;
        for (const BlockRun& run : stream.queue) blocks += run.digests.size();
        report.require(blocks == stream.queued_blocks, "events: stream ", id, " counts ",
                       stream.queued_blocks, " queued blocks of ", blocks);
        for (NodeId node = 0; node < tree_.end_id(); ++node) {
            const int now = tree_.is_live(node) ? visible(stream, node) : 0;
            const int reported = stream.at(node) & ~kSwept;
            const bool is_left = stream.sweeps && (stream.at(node) & kSwept) == 0;
            report.require(is_left ? (reported & ~now) == 0 : reported == now, "events: stream ",
                           id, " has reported media ", reported, " of node ", node,
                           ", which is on ", now);
        }
    }
}

}  // namespace aiokv
