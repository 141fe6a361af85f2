// Block copies between device memory and the block-first host pool.
//
//   host pool    [host_block][layer][region bytes]      one block is one contiguous object
//   device       one tensor per (layer, region), block = first axis, any block stride
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aiokv/direction.hpp"
#include "aiokv/event.hpp"
#include "aiokv/ids.hpp"
#include "aiokv/stream.hpp"

namespace aiokv {

// The bytes of one region in one layer.
struct Piece {
    std::uintptr_t device_base = 0;
    std::size_t device_stride = 0;  // bytes from a device block to the next
    std::size_t bytes = 0;          // per block
    std::size_t host_offset = 0;    // in the host block
};

// Addresses of the blocks of both tiers. Does not own the memory. Immutable.
struct BlockMap : std::enable_shared_from_this<BlockMap> {
    std::vector<std::vector<Piece>> layers;
    std::uintptr_t host_base = 0;
    std::size_t host_stride = 0;
    std::int64_t host_blocks = 0;
    std::int64_t device_blocks = 0;

    // Throws LayoutError unless every piece lies in its host block and its device stride.
    void check() const;
};

// Blocks that are consecutive on both sides: host..host+length and device..device+length.
struct CopyRun {
    std::int64_t host = 0;
    std::int64_t device = 0;
    std::int64_t length = 0;
};

// Throws UsageError unless the ids of a copy between the two tiers are valid: see ids.hpp.
void check_ids(const BlockMap& map, Direction direction, std::span<const std::int32_t> host_ids,
               std::span<const std::int32_t> device_ids);

// Returns the pairs sorted by host id; pairs that are consecutive on both sides form one run. The
// lists must have equal lengths.
std::vector<CopyRun> merge_runs(std::span<const std::int32_t> host_ids,
                                std::span<const std::int32_t> device_ids);

struct CopyError {
    std::size_t first_bad_block = 0;  // index into the job's id lists
    std::string reason;
};

// One transfer in flight. Thread-safe.
class CopyJob {
  public:
    explicit CopyJob(std::vector<std::shared_ptr<Event>> events) : events_(std::move(events)) {}

    // One per layer for an onload; one for all layers of an offload.
    const std::vector<std::shared_ptr<Event>>& events() const { return events_; }

    std::optional<CopyError> error() const;
    void fail(CopyError error);  // the first error is kept

  private:
    const std::vector<std::shared_ptr<Event>> events_;
    mutable std::mutex mutex_;
    std::optional<CopyError> error_;
};

// Queues a copy on `stream` and returns at once. The copy starts after `after`, if given; when that
// event failed, the job fails without moving a byte. Throws UsageError as check_ids() does.
std::shared_ptr<CopyJob> copy_blocks(Stream& stream, std::shared_ptr<const BlockMap> map,
                                     Direction direction, std::span<const std::int32_t> host_ids,
                                     std::span<const std::int32_t> device_ids,
                                     std::shared_ptr<Event> after = nullptr);

// Returns the error of one recording of an event that a copy waited for; empty for success.
std::string failure_of(const Event& event, std::uint64_t generation);

}  // namespace aiokv
