#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "aiokv/cuda_layout.hpp"

namespace aiokv::cuda {

// Whole blocks and short runs go as one batch, longer runs as one strided copy each; without
// batches in the driver, as plain copies.
void submit_host_copies(std::span<const HostCopy> copies, bool to_device, std::uint8_t* staging,
                        std::size_t min_strided_rows, cudaStream_t stream);

}  // namespace aiokv::cuda
