#include <algorithm>

#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_lane.hpp"

namespace aiokv::cuda {

IdBuffer::IdBuffer(std::size_t capacity, EventPool& events)
    : capacity_(std::max<std::size_t>(capacity, 1)), events_(events) {
    const std::size_t bytes = 2 * capacity_ * sizeof(std::int32_t);
    try {
        check(cudaHostAlloc(reinterpret_cast<void**>(&pinned_), bytes, cudaHostAllocMapped),
              "cudaHostAlloc for block ids");
        check(cudaMalloc(reinterpret_cast<void**>(&device_), bytes), "cudaMalloc for block ids");
        free_ = events_.take();
    } catch (...) {
        cudaFreeHost(pinned_);
        throw;
    }
}

IdBuffer::~IdBuffer() {
    cudaFree(device_);
    cudaFreeHost(pinned_);
    events_.give(free_);
}

void IdBuffer::upload(std::span<const std::int32_t> device_ids,
                      std::span<const std::int32_t> host_ids, cudaStream_t stream) {
    if (used_) {
        check(cudaEventSynchronize(free_), "waiting for a buffer of block ids");
    }
    std::copy(device_ids.begin(), device_ids.end(), pinned_);
    std::copy(host_ids.begin(), host_ids.end(), pinned_ + capacity_);
    launch_upload(device_, pinned_, device_ids.size(), stream);
    if (!host_ids.empty()) {
        launch_upload(device_ + capacity_, pinned_ + capacity_, host_ids.size(), stream);
    }
}

void IdBuffer::release(cudaStream_t stream) {
    check(cudaEventRecord(free_, stream), "cudaEventRecord");
    used_ = true;
}

}  // namespace aiokv::cuda
