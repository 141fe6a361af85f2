// Copies of blocks between any pairs of host and device tensors, on a given stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "aiokv/direction.hpp"

namespace aiokv::cuda {

// A device tensor and the host tensor that holds the same bytes per block.
struct TensorPair {
    std::uintptr_t device_base;  // address of block 0
    std::size_t device_stride;   // bytes from one block to the next; so is the other stride
    std::uintptr_t host_base;
    std::size_t host_stride;
    std::size_t bytes;  // per block
};

// Copies between block host_ids[i] and block device_ids[i] of every pair, in one direction. The
// caller has checked the ids. Runs of blocks that are adjacent on both sides become one copy.
// Asynchronous for page-locked host memory. Throws DeviceError, after which some copies may have
// been submitted.
void swap_blocks(std::span<const TensorPair> pairs, std::span<const std::int32_t> host_ids,
                 std::span<const std::int32_t> device_ids, Direction direction, int device,
                 cudaStream_t stream);

}  // namespace aiokv::cuda
