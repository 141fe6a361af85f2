#include "aiokv/copy.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "aiokv/cache_lines.hpp"

namespace aiokv {

namespace {

// A larger job uses streaming stores: it would evict everything else from the CPU caches, and its
// own first bytes, too.
constexpr std::size_t kStreamedJobBytes = std::size_t{8} << 20;
// Bytes copied between two checks of the stop flag: a few hundred microseconds.
constexpr std::size_t kChunkBytes = std::size_t{4} << 20;

using Failure = const char*;  // text of a failure; null for none
constexpr Failure kAborted = "the stream was aborted while the copy was in flight";

using Ids = std::span<const std::int32_t>;

// State of one job for the stream's thread.
class Mover {
  public:
    Mover(std::shared_ptr<const BlockMap> map, Direction direction, std::vector<CopyRun> runs)
        : map_(std::move(map)), direction_(direction), runs_(std::move(runs)) {
        std::size_t block_bytes = 0;
        for (const auto& pieces : map_->layers) {
            for (const auto& piece : pieces) block_bytes += piece.bytes;
        }
        std::int64_t blocks = 0;
        for (const auto& run : runs_) blocks += run.length;
        streaming_ = block_bytes * static_cast<std::size_t>(blocks) >= kStreamedJobBytes;
    }

    // Moves the bytes of one event: a layer of an onload, all layers of an offload. Returns null,
    // or the reason why it stopped before the last byte.
    Failure move_step(std::size_t step, const std::atomic<bool>& stop) const {
        return direction_ == Direction::kOnload ? move_layer(step, stop) : move_all(stop);
    }

  private:
    Failure move_layer(std::size_t layer, const std::atomic<bool>& stop) const {
        for (const auto& piece : map_->layers[layer]) {
            for (const auto& run : runs_) {
                if (const auto failure = move_run(piece, run, stop)) return failure;
            }
        }
        if (streaming_) streaming_fence();
        return nullptr;
    }

    // Copies block by block, so that each host block is written sequentially.
    Failure move_all(const std::atomic<bool>& stop) const {
        for (const auto& run : runs_) {
            if (const auto failure = move_run_of_all(run, stop)) return failure;
        }
        if (streaming_) streaming_fence();
        return nullptr;
    }

    bool dense(const Piece& piece) const {
        return piece.device_stride == piece.bytes && map_->host_stride == piece.bytes;
    }

    Failure move_run(const Piece& piece, const CopyRun& run, const std::atomic<bool>& stop) const {
        if (dense(piece)) {
            const auto bytes = static_cast<std::size_t>(run.length) * piece.bytes;
            return move_bytes(piece, run.host, run.device, bytes, stop);
        }
        for (std::int64_t i = 0; i < run.length; ++i) {
            if (const auto failure = move_block(piece, run, i, stop)) return failure;
        }
        return nullptr;
    }

    Failure move_run_of_all(const CopyRun& run, const std::atomic<bool>& stop) const {
        // A dense piece is the only piece of its host block, so no other piece is left out.
        for (const auto& pieces : map_->layers) {
            for (const auto& piece : pieces) {
                if (dense(piece)) return move_run(piece, run, stop);
            }
        }
        for (std::int64_t i = 0; i < run.length; ++i) {
            for (const auto& pieces : map_->layers) {
                for (const auto& piece : pieces) {
                    if (const auto failure = move_block(piece, run, i, stop)) return failure;
                }
            }
        }
        return nullptr;
    }

    Failure move_block(const Piece& piece, const CopyRun& run, std::int64_t i,
                       const std::atomic<bool>& stop) const {
        return move_bytes(piece, run.host + i, run.device + i, piece.bytes, stop);
    }

    Failure move_bytes(const Piece& piece, std::int64_t host_block, std::int64_t device_block,
                       std::size_t bytes, const std::atomic<bool>& stop) const {
        auto* host = reinterpret_cast<char*>(map_->host_base) +
                     static_cast<std::size_t>(host_block) * map_->host_stride + piece.host_offset;
        auto* device = reinterpret_cast<char*>(piece.device_base) +
                       static_cast<std::size_t>(device_block) * piece.device_stride;
        char* to = direction_ == Direction::kOnload ? device : host;
        const char* from = direction_ == Direction::kOnload ? host : device;
        for (std::size_t at = 0; at < bytes; at += kChunkBytes) {
            if (stop.load(std::memory_order_relaxed)) return kAborted;
            copy_bytes(to + at, from + at, std::min(kChunkBytes, bytes - at), streaming_);
        }
        return nullptr;
    }

    std::shared_ptr<const BlockMap> map_;
    Direction direction_;
    std::vector<CopyRun> runs_;
    bool streaming_ = false;
};

// Runs on the stream's thread. Finishes every event, even after a failure.
void run_job(CopyJob& job, const Mover& mover, const std::vector<std::uint64_t>& generations,
             std::string failure, const std::atomic<bool>& stop) {
    const auto& events = job.events();
    for (std::size_t i = 0; i < events.size(); ++i) {
        if (failure.empty()) {
            if (const auto reason = mover.move_step(i, stop)) failure = reason;
        }
        if (!failure.empty()) job.fail({0, failure});
        events[i]->finish(generations[i], failure);
    }
}

}  // namespace

std::string failure_of(const Event& event, std::uint64_t generation) {
    const auto error = event.error();
    if (error.empty() || event.generation() != generation) return {};
    return "the event that the copy waited for failed: " + error;
}

void BlockMap::check() const {
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        for (const auto& piece : layers[layer]) {
            if (piece.host_offset + piece.bytes > host_stride ||
                piece.bytes > piece.device_stride) {
                throw LayoutError("layer " + std::to_string(layer) + ": " +
                                  std::to_string(piece.bytes) + " bytes at offset " +
                                  std::to_string(piece.host_offset) +
                                  " do not fit host blocks of " + std::to_string(host_stride) +
                                  " bytes, or device blocks of " +
                                  std::to_string(piece.device_stride) + " bytes");
            }
        }
    }
}

void check_ids(const BlockMap& map, Direction direction, Ids host_ids, Ids device_ids) {
    const IdPool host{"host block", map.host_blocks};
    const IdPool device{"device block", map.device_blocks};
    if (direction == Direction::kOnload) {
        check_ids({.sources = host_ids, .targets = device_ids}, host, device);
    } else {
        check_ids({.sources = device_ids, .targets = host_ids}, device, host);
    }
}

std::vector<CopyRun> merge_runs(Ids host_ids, Ids device_ids) {
    std::vector<std::size_t> order(host_ids.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (!std::is_sorted(host_ids.begin(), host_ids.end())) {
        std::stable_sort(order.begin(), order.end(),
                         [&](auto a, auto b) { return host_ids[a] < host_ids[b]; });
    }
    std::vector<CopyRun> runs;
    for (const auto i : order) {
        const std::int64_t host = host_ids[i];
        const std::int64_t device = device_ids[i];
        if (!runs.empty() && runs.back().host + runs.back().length == host &&
            runs.back().device + runs.back().length == device) {
            ++runs.back().length;
        } else {
            runs.push_back({host, device, 1});
        }
    }
    return runs;
}

std::optional<CopyError> CopyJob::error() const {
    std::lock_guard lock(mutex_);
    return error_;
}

void CopyJob::fail(CopyError error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
}

std::shared_ptr<CopyJob> copy_blocks(Stream& stream, std::shared_ptr<const BlockMap> map,
                                     Direction direction, Ids host_ids, Ids device_ids,
                                     std::shared_ptr<Event> after) {
    check_ids(*map, direction, host_ids, device_ids);
    const auto layers = map->layers.size();
    const auto steps = direction == Direction::kOnload ? layers : std::min<std::size_t>(layers, 1);
    std::vector<std::shared_ptr<Event>> events(steps);
    std::vector<std::uint64_t> generations(steps);
    for (std::size_t i = 0; i < steps; ++i) {
        events[i] = std::make_shared<Event>();
        generations[i] = events[i]->open();
    }
    auto job = std::make_shared<CopyJob>(std::move(events));
    const auto after_generation = after ? after->generation() : 0;
    if (after) stream.wait_event(after);
    // The stream's thread merges the ids: of a long list, that takes longer than a copy of the ids.
    stream.push([=, map = std::move(map), host = std::vector(host_ids.begin(), host_ids.end()),
                 device = std::vector(device_ids.begin(), device_ids.end())](
                    const std::atomic<bool>& stop) {
        const Mover mover(map, direction, merge_runs(host, device));
        run_job(*job, mover, generations, after ? failure_of(*after, after_generation) : "", stop);
    });
    return job;
}

}  // namespace aiokv
