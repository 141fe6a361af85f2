#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_kernels.hpp"
#include "copy_chunk.cuh"

namespace aiokv::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) direct_kernel(const __grid_constant__ KernelCopy copy) {
    for_each_chunk(copy, [](const Chunk& chunk, std::uint32_t lane) { to_device(chunk, lane); });
}

}  // namespace

void launch_direct(const KernelCopy& copy, int blocks, cudaStream_t stream) {
    direct_kernel<<<blocks, kThreads, 0, stream>>>(copy);
    check_launch("direct kernel");
}

}  // namespace aiokv::cuda
