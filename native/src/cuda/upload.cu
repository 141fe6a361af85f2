#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_kernels.hpp"

namespace aiokv::cuda {
namespace {

__global__ void upload_kernel(std::int32_t* to, const std::int32_t* from, std::uint32_t count) {
    for (std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * blockDim.x) {
        to[i] = __ldcs(from + i);
    }
}

}  // namespace

void launch_upload(std::int32_t* to, const std::int32_t* from, std::size_t count,
                   cudaStream_t stream) {
    if (count == 0) {
        return;
    }
    upload_kernel<<<1, kThreads, 0, stream>>>(to, from, static_cast<std::uint32_t>(count));
    check_launch("upload kernel");
}

}  // namespace aiokv::cuda
