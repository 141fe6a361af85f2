// What the GPU bench compares with, and the spinner that stamps the end of a transfer.
// Built by bench/gpu_native.py with nvcc into a shared library; not part of the package.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

struct Spinner {
    const volatile std::uint32_t* flags;
    double* stamps;
    std::uint32_t count;
    std::atomic<bool> stop{false};
    std::thread thread;
};

// One warp a slice on every SM: the usual shape of a swap kernel.
__global__ void warp_a_slice(std::uint8_t* const* to, const std::uint8_t* const* from,
                             std::uint32_t count, std::uint32_t bytes) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t warps = gridDim.x * blockDim.x / 32;
    for (std::uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < count; i += warps) {
        auto* target = reinterpret_cast<std::uint64_t*>(to[i]);
        const auto* source = reinterpret_cast<const std::uint64_t*>(from[i]);
        for (std::uint32_t word = lane; word < bytes / 8; word += 32) {
            __stcs(target + word, __ldcs(source + word));
        }
    }
}

}  // namespace

extern "C" {

int copy_each(void* const* to, const void* const* from, std::uint32_t count, std::size_t bytes,
              void* stream) {
    for (std::uint32_t i = 0; i < count; ++i) {
        const cudaError_t code = cudaMemcpyAsync(to[i], from[i], bytes, cudaMemcpyDefault,
                                                 static_cast<cudaStream_t>(stream));
        if (code != cudaSuccess) return code;
    }
    return 0;
}

int copy_batch(void** to, void** from, std::uint32_t count, std::size_t bytes, void* stream) {
#if CUDART_VERSION >= 13000
    std::vector<std::size_t> sizes(count, bytes);
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t index = 0;
    return cudaMemcpyBatchAsync((const void**)to, (const void**)from, sizes.data(), count,
                                &attributes, &index, 1, static_cast<cudaStream_t>(stream));
#else
    return copy_each(to, from, count, bytes, stream);
#endif
}

// `to` and `from` are in device memory.
int copy_warps(std::uint8_t* const* to, const std::uint8_t* const* from, std::uint32_t count,
               std::uint32_t bytes, int sms, void* stream) {
    warp_a_slice<<<2 * sms, 1024, 0, static_cast<cudaStream_t>(stream)>>>(to, from, count, bytes);
    return cudaGetLastError();
}

// Watches flags[0], flags[1], ... in turn, and stamps each when it becomes non-zero.
void* spinner_start(const std::uint32_t* flags, double* stamps, std::uint32_t count) {
    auto* spinner = new Spinner{flags, stamps, count, {false}, {}};
    spinner->thread = std::thread([spinner] {
        for (std::uint32_t i = 0; i < spinner->count; ++i) {
            while (spinner->flags[i] == 0) {
                if (spinner->stop.load(std::memory_order_relaxed)) return;
            }
            spinner->stamps[i] = now();
        }
    });
    return spinner;
}

void spinner_stop(void* handle) {
    auto* spinner = static_cast<Spinner*>(handle);
    spinner->stop.store(true);
    spinner->thread.join();
    delete spinner;
}

// The driver's own command, found at run time: not every machine has a library to link.
int write_flag(void* stream, const std::uint32_t* flag) {
    using Write = int (*)(void*, unsigned long long, std::uint32_t, unsigned);
    static const auto write =
        reinterpret_cast<Write>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuStreamWriteValue32_v2"));
    return write(stream, reinterpret_cast<unsigned long long>(flag), 1, 0);
}
}
