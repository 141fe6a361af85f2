// Kernels between device blocks and slots in device memory, which prove the bytes on their way.
//
// A slot holds a payload, laid out as a host block, and behind it the trailer of trailer.hpp. The
// checksum is that of checksum.hpp: each warp sums units of 32 chunks, and the warp that finishes
// the last unit of a slot combines them, then writes the trailer or compares it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "aiokv/checksum.hpp"
#include "aiokv/cuda_kernels.hpp"
#include "aiokv/mersenne.hpp"

namespace aiokv::cuda {

inline constexpr std::uint32_t kUnitChunks = 32;
inline constexpr std::uint32_t kUnitBytes = kUnitChunks * Checksum::kChunkBytes;
inline constexpr int kSumThreads = 768;  // 80 registers per thread: no spills
// Rows of a launch, which are parameters of the kernel: 4 KiB of them, or 32 KiB since CUDA 12.1.
#if CUDART_VERSION >= 12010
inline constexpr std::uint32_t kPassRows = 256;
inline constexpr std::size_t kMaxParameterBytes = 32764;
#else
inline constexpr std::uint32_t kPassRows = 88;
inline constexpr std::size_t kMaxParameterBytes = 4096;
#endif

// Numbers of the checksum, in device memory.
struct SumConstants {
    alignas(16) std::uint64_t words[Checksum::kChunkBytes / 8];
    mersenne::U128 powers[kUnitChunks + 1];       // K^i
    mersenne::U128 unit_powers[kUnitChunks + 1];  // K^(i * kUnitChunks)

    static SumConstants make();
};

// Address, in block 0 on the device, of one stretch of kChunkBytes of the payload.
struct Step {
    std::uintptr_t base;
    std::size_t stride;
};

// Sources and targets of a pass.
enum class Way : std::uint8_t {
    kRead,     // slots, only read
    kGather,   // device blocks to slots
    kScatter,  // slots to device blocks
};

struct PassRow {
    std::uint64_t key[4];
    std::int32_t slot;
    std::int32_t device_id;
};

// Slots whose bytes are summed. With kGather and kScatter, each stretch of kChunkBytes of the
// payload must belong to one piece of a block.
struct SlotPass {
    std::uint8_t* slots;
    std::size_t pitch;
    std::size_t payload_bytes;      // a multiple of 16
    const Step* steps;              // unused with kRead
    const SumConstants* constants;  // device memory, like all pointers below
    mersenne::U128* sums;           // [rows][units]; belongs to the stream
    std::uint32_t* arrived;         // [rows], zeros before and after the pass
    std::uint32_t* results;         // [rows] StoreResult, mapped host memory; null: write trailers
    std::uint32_t units;            // per row
    std::uint32_t num_rows;
    PassRow rows[kPassRows];
};
static_assert(sizeof(SlotPass) <= kMaxParameterBytes);

// Prepares launches with bulk copies on the current device. Returns false if the kernels were built
// for a GPU before sm_90, which has no bulk copies.
bool prepare_bulk_copies();

// `bulk`: use bulk copies, which need fewer instructions and therefore fewer CTAs.
void launch_slot_pass(const SlotPass& pass, Way way, int blocks, bool bulk, cudaStream_t stream);

// Copies rows of any layout, without a checksum. The ids and rows are those of `pass`; `copy` has
// none.
void launch_slot_copy(const SlotPass& pass, KernelCopy copy, Way way, int blocks,
                      cudaStream_t stream);

}  // namespace aiokv::cuda
