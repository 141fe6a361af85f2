// Device code shared by the three copy kernels.
#pragma once

#include <cstdint>

#include "aiokv/cuda_kernels.hpp"

namespace aiokv::cuda {

// The chunk that a warp copies, with its slice and row.
struct Chunk {
    std::uint8_t* device;
    std::uint8_t* other;
    std::uint32_t bytes;    // 0: the slice is shorter than the largest
    std::uint32_t padding;  // padding in host bytes behind the last chunk of the slice
};

__device__ inline Chunk locate(const KernelCopy& copy, std::uint32_t unit) {
    const std::uint32_t chunk = unit % copy.chunks_per_slice;
    const std::uint32_t rest = unit / copy.chunks_per_slice;
    const Slice& slice = copy.slices[rest % copy.num_slices];
    const std::uint32_t row = rest / copy.num_slices;
    const std::size_t begin = static_cast<std::size_t>(chunk) * kChunkBytes;
    if (begin >= slice.bytes) {
        return {nullptr, nullptr, 0, 0};
    }
    const std::size_t left = slice.bytes - begin;
    const std::size_t other_row =
        copy.rows.row_ids == nullptr ? row : static_cast<std::size_t>(copy.rows.row_ids[row]);
    const auto device_block = static_cast<std::size_t>(copy.device_ids[row]);
    return {reinterpret_cast<std::uint8_t*>(slice.device_base) +
                device_block * slice.device_stride + begin,
            copy.rows.base + other_row * copy.rows.row_bytes + slice.host_offset -
                copy.rows.window_offset + begin,
            static_cast<std::uint32_t>(left < kChunkBytes ? left : kChunkBytes),
            static_cast<std::uint32_t>(left <= kChunkBytes ? slice.host_bytes - slice.bytes : 0)};
}

// Does all loads before the first store, so that it waits for one vector instead of eight. Uses
// streaming hints, because these bytes are not read again soon.
__device__ inline void copy_full_chunk(std::uint8_t* to, const std::uint8_t* from,
                                       std::uint32_t lane) {
    constexpr int kUnroll = kChunkBytes / (32 * sizeof(uint4));
    auto* destination = reinterpret_cast<uint4*>(to) + lane;
    const auto* source = reinterpret_cast<const uint4*>(from) + lane;
    uint4 values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        values[i] = __ldcs(source + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        __stcs(destination + 32 * i, values[i]);
    }
}

template <typename Vector>
__device__ inline void copy_vectors(std::uint8_t* to, const std::uint8_t* from, std::uint32_t count,
                                    std::uint32_t lane) {
    auto* destination = reinterpret_cast<Vector*>(to);
    const auto* source = reinterpret_cast<const Vector*>(from);
#pragma unroll 2
    for (std::uint32_t i = lane; i < count; i += 32) {
        __stcs(destination + i, __ldcs(source + i));
    }
}

// Copies any size at any alignment, by the widest vectors that both addresses allow and then by
// bytes.
__device__ inline void copy_bytes(std::uint8_t* to, const std::uint8_t* from, std::uint32_t bytes,
                                  std::uint32_t lane) {
    const auto alignment =
        reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
    std::uint32_t done;
    if (alignment % 16 == 0 && bytes == kChunkBytes) {
        done = kChunkBytes;
        copy_full_chunk(to, from, lane);
    } else if (alignment % 16 == 0) {
        done = bytes & ~15u;
        copy_vectors<uint4>(to, from, bytes / 16, lane);
    } else if (alignment % 8 == 0) {
        done = bytes & ~7u;
        copy_vectors<uint2>(to, from, bytes / 8, lane);
    } else if (alignment % 4 == 0) {
        done = bytes & ~3u;
        copy_vectors<unsigned>(to, from, bytes / 4, lane);
    } else {
        done = 0;
    }
    for (std::uint32_t i = done + lane; i < bytes; i += 32) {
        to[i] = from[i];
    }
}

// Writes the bytes of a chunk, and its padding.
__device__ inline void to_host(const Chunk& chunk, std::uint32_t lane) {
    copy_bytes(chunk.other, chunk.device, chunk.bytes, lane);
    for (std::uint32_t i = lane; i < chunk.padding; i += 32) {
        chunk.other[chunk.bytes + i] = 0;
    }
}

__device__ inline void to_device(const Chunk& chunk, std::uint32_t lane) {
    copy_bytes(chunk.device, chunk.other, chunk.bytes, lane);
}

// Calls work(chunk, lane) for every chunk of the copy, one warp per chunk.
template <typename Work>
__device__ inline void for_each_chunk(const KernelCopy& copy, Work work) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const std::uint32_t step = gridDim.x * blockDim.x / 32;
    const std::uint32_t total = copy.num_rows * copy.num_slices * copy.chunks_per_slice;
    for (std::uint32_t unit = first; unit < total; unit += step) {
        work(locate(copy, unit), lane);
    }
}

}  // namespace aiokv::cuda
