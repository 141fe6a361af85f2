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
// Submits the copies as one batch if the driver supports batches, else one by one. Requires
// page-locked host memory and a `stream` that is not a default stream.
void submit_batch(CopyBatch& batch, cudaStream_t stream);

// Submits whole blocks and short runs as one batch, and each longer run as a strided copy. If the
// driver has no batches, it submits plain copies instead.
void submit_host_copies(std::span<const HostCopy> copies, bool to_device, std::uint8_t* staging,
                        std::size_t min_strided_rows, cudaStream_t stream);

}  // namespace aiokv::cuda
