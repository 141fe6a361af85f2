// Submits the copies between host blocks and a staging slot.
#include "aiokv/cuda_host_copies.hpp"

#include "aiokv/cuda_check.hpp"

namespace aiokv::cuda {
namespace {

// cudaMemcpyBatchAsync needs CUDA 12.8, and a driver that supports it.
bool driver_has_batches() {
#if CUDART_VERSION >= 12080
    static const bool has = [] {
        int version = 0;
        return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12080;
    }();
    return has;
#else
    return false;
#endif
}

void append(CopyBatch& batch, bool to_device, void* host, void* staging, std::size_t bytes) {
    batch.to.push_back(to_device ? staging : host);
    batch.from.push_back(to_device ? host : staging);
    batch.sizes.push_back(bytes);
}

void submit_strided(const HostCopy& copy, bool to_device, void* host, void* staging,
                    cudaStream_t stream) {
    if (to_device) {
        check(cudaMemcpy2DAsync(staging, copy.bytes, host, copy.host_pitch, copy.bytes, copy.rows,
                                cudaMemcpyHostToDevice, stream),
              "cudaMemcpy2DAsync");
    } else {
        check(cudaMemcpy2DAsync(host, copy.host_pitch, staging, copy.bytes, copy.bytes, copy.rows,
                                cudaMemcpyDeviceToHost, stream),
              "cudaMemcpy2DAsync");
    }
}

}  // namespace

void submit_each(const CopyBatch& batch, cudaStream_t stream) {
    for (std::size_t i = 0; i < batch.sizes.size(); ++i) {
        check(
            cudaMemcpyAsync(batch.to[i], batch.from[i], batch.sizes[i], cudaMemcpyDefault, stream),
            "cudaMemcpyAsync");
    }
}

void submit_batch(CopyBatch& batch, cudaStream_t stream) {
    if (batch.sizes.size() <= 1 || !driver_has_batches()) {
        submit_each(batch, stream);
        return;
    }
#if CUDART_VERSION >= 12080
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t index = 0;
#if CUDART_VERSION >= 13000
    check(cudaMemcpyBatchAsync(batch.to.data(), batch.from.data(), batch.sizes.data(),
                               batch.sizes.size(), &attributes, &index, 1, stream),
          "cudaMemcpyBatchAsync");
#else
    std::size_t failed = 0;
    check(cudaMemcpyBatchAsync(batch.to.data(), batch.from.data(), batch.sizes.data(),
                               batch.sizes.size(), &attributes, &index, 1, &failed, stream),
          "cudaMemcpyBatchAsync");
#endif
#endif
}

void submit_host_copies(std::span<const HostCopy> copies, bool to_device, std::uint8_t* staging,
                        std::size_t min_strided_rows, cudaStream_t stream) {
    CopyBatch batch;
    for (const HostCopy& copy : copies) {
        auto* host = reinterpret_cast<std::uint8_t*>(copy.host);
        std::uint8_t* dense = staging + copy.staging_offset;
        if (copy.bytes == copy.host_pitch) {  // whole blocks form one contiguous piece
            append(batch, to_device, host, dense, copy.bytes * copy.rows);
        } else if (copy.rows >= min_strided_rows) {
            submit_strided(copy, to_device, host, dense, stream);
        } else {
            for (std::size_t row = 0; row < copy.rows; ++row) {
                append(batch, to_device, host + row * copy.host_pitch, dense + row * copy.bytes,
                       copy.bytes);
            }
        }
    }
    submit_batch(batch, stream);
}

}  // namespace aiokv::cuda
