#include "aiokv/cuda_swap_blocks.hpp"

#include <vector>

#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_events.hpp"
#include "aiokv/cuda_host_copies.hpp"
#include "aiokv/cuda_planner.hpp"

namespace aiokv::cuda {
namespace {

struct Run {
    std::int32_t host;
    std::int32_t device;
    std::size_t blocks;
};

std::vector<Run> runs_of(std::span<const std::int32_t> host_ids,
                         std::span<const std::int32_t> device_ids) {
    std::vector<std::uint32_t> order;
    sort_by_id(host_ids, order);
    std::vector<Run> runs;
    for (const std::uint32_t i : order) {
        const auto length = runs.empty() ? 0 : static_cast<std::int32_t>(runs.back().blocks);
        if (!runs.empty() && host_ids[i] == runs.back().host + length &&
            device_ids[i] == runs.back().device + length) {
            ++runs.back().blocks;
        } else {
            runs.push_back({host_ids[i], device_ids[i], 1});
        }
    }
    return runs;
}

void append(CopyBatch& batch, const TensorPair& pair, const Run& run, Direction direction) {
    const bool dense = pair.device_stride == pair.bytes && pair.host_stride == pair.bytes;
    const std::size_t copies = dense ? 1 : run.blocks;
    const std::size_t bytes = dense ? run.blocks * pair.bytes : pair.bytes;
    for (std::size_t i = 0; i < copies; ++i) {
        auto* host = reinterpret_cast<void*>(
            pair.host_base + (static_cast<std::size_t>(run.host) + i) * pair.host_stride);
        auto* device = reinterpret_cast<void*>(
            pair.device_base + (static_cast<std::size_t>(run.device) + i) * pair.device_stride);
        batch.to.push_back(direction == Direction::kOnload ? device : host);
        batch.from.push_back(direction == Direction::kOnload ? host : device);
        batch.sizes.push_back(bytes);
    }
}

bool is_pinned(std::uintptr_t address) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address)),
          "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeHost;
}

// The driver accepts no batches on default streams.
bool is_default(cudaStream_t stream) {
    return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

}  // namespace

void swap_blocks(std::span<const TensorPair> pairs, std::span<const std::int32_t> host_ids,
                 std::span<const std::int32_t> device_ids, Direction direction, int device,
                 cudaStream_t stream) {
    const DeviceScope scope(device);
    const std::vector<Run> runs = runs_of(host_ids, device_ids);
    for (const TensorPair& pair : pairs) {
        CopyBatch batch;
        for (const Run& run : runs) {
            append(batch, pair, run, direction);
        }
        if (is_default(stream) || !is_pinned(pair.host_base)) {
            submit_each(batch, stream);
        } else {
            submit_batch(batch, stream);
        }
    }
}

}  // namespace aiokv::cuda
