#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "aiokv/cuda_layout.hpp"

namespace aiokv::cuda {

// Contiguous copies between host and device memory.
struct CopyBatch {
    std::vector<void*> to;
    std::vector<void*> from;
    std::vector<std::size_t> sizes;
};

// Submits the copies one by one, in order.
void submit_each(const CopyBatch& batch, cudaStream_t stream);
// Submits the copies as one batch if the driver has batches, else one by one. `stream` is none of
// the default streams, and the host memory is page-locked.
void submit_batch(CopyBatch& batch, cudaStream_t stream);

// Whole blocks and short runs go as one batch, longer runs as one strided copy each; without
// batches in the driver, as plain copies.
void submit_host_copies(std::span<const HostCopy> copies, bool to_device, std::uint8_t* staging,
                        std::size_t min_strided_rows, cudaStream_t stream);

}  // namespace aiokv::cuda
