// The copies inside device memory, and from mapped host memory to it. All launchers are
// asynchronous, on the stream they are given, and throw DeviceError.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "aiokv/cuda_layout.hpp"

namespace aiokv::cuda {

// The other side's rows: a dense staging buffer, or the host blocks with the ids `row_ids`.
struct Rows {
    std::uint8_t* base;           // row 0; a slice is at slice.host_offset - window_offset
    const std::int32_t* row_ids;  // device memory; null: rows follow each other
    std::size_t row_bytes;        // from one row to the next
    std::size_t window_offset;
};

struct KernelCopy {
    const Slice* slices;             // device memory, the first slice of the window
    std::uint32_t num_slices;        // slices in the window
    std::uint32_t chunks_per_slice;  // chunks of kChunkBytes in the largest slice
    const std::int32_t* device_ids;  // device memory, [num_rows]
    std::uint32_t num_rows;
    Rows rows;
};

// A warp moves one chunk at a time: eight 16-byte vectors in flight per thread.
inline constexpr std::uint32_t kChunkBytes = 4096;
inline constexpr int kThreads = 1024;

// Copies staging rows to device blocks.
void launch_scatter(const KernelCopy& copy, int blocks, cudaStream_t stream);
// Copies device blocks to staging rows. Fills padding with zeros, so that no stale bytes reach a
// disk.
void launch_gather(const KernelCopy& copy, int blocks, cudaStream_t stream);
// Copies mapped host blocks to device blocks across the link. Uses few CTAs: more would only wait
// for the link.
void launch_direct(const KernelCopy& copy, int blocks, cudaStream_t stream);
// Copies ids from mapped host memory by a kernel: a copy engine would queue them behind megabytes
// of blocks.
void launch_upload(std::int32_t* to, const std::int32_t* from, std::size_t count,
                   cudaStream_t stream);

}  // namespace aiokv::cuda
