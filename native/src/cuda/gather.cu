#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_kernels.hpp"
#include "copy_chunk.cuh"

namespace aiokv::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ KernelCopy copy) {
    for_each_chunk(copy, [](const Chunk& chunk, std::uint32_t lane) {
        copy_bytes(chunk.other, chunk.device, chunk.bytes, lane);
        for (std::uint32_t i = lane; i < chunk.padding; i += 32) {
            chunk.other[chunk.bytes + i] = 0;
        }
    });
}

}  // namespace

void launch_gather(const KernelCopy& copy, int blocks, cudaStream_t stream) {
    gather_kernel<<<blocks, kThreads, 0, stream>>>(copy);
    check_launch("gather kernel");
}

}  // namespace aiokv::cuda
