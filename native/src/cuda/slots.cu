#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_slot_kernels.hpp"
#include "aiokv/trailer.hpp"
#include "copy_chunk.cuh"

namespace aiokv::cuda {
namespace {

using mersenne::multiplied;
using mersenne::reduced;
using mersenne::U128;

constexpr std::uint32_t kAllLanes = 0xffffffff;
constexpr int kRingBytes = kSumThreads / 32 * 2 * kChunkBytes;
constexpr int kVectors = kChunkBytes / (32 * sizeof(uint4));  // per lane
constexpr int kSums = kChunkBytes / Checksum::kChunkBytes;
static_assert(kVectors == 8 && kSums == 4, "a lane reads two vectors of each chunk");

// A sum of products mod 2^128, as words of weight 1 and words of weight 2^32.
struct Products {
    std::uint32_t even[4] = {};
    std::uint32_t odd[3] = {};

    __device__ void add(uint4 data, uint4 key) {
        std::uint32_t a0, a1, b0, b1;
        asm("add.cc.u32 %0, %2, %4;\n\taddc.u32 %1, %3, %5;"
            : "=r"(a0), "=r"(a1)
            : "r"(data.x), "r"(data.y), "r"(key.x), "r"(key.y));
        asm("add.cc.u32 %0, %2, %4;\n\taddc.u32 %1, %3, %5;"
            : "=r"(b0), "=r"(b1)
            : "r"(data.z), "r"(data.w), "r"(key.z), "r"(key.w));
        asm("mad.lo.cc.u32 %0, %4, %6, %0;\n\t"
            "madc.hi.cc.u32 %1, %4, %6, %1;\n\t"
            "madc.lo.cc.u32 %2, %5, %7, %2;\n\t"
            "madc.hi.u32 %3, %5, %7, %3;"
            : "+r"(even[0]), "+r"(even[1]), "+r"(even[2]), "+r"(even[3])
            : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
        asm("mad.lo.cc.u32 %0, %3, %6, %0;\n\t"
            "madc.hi.cc.u32 %1, %3, %6, %1;\n\t"
            "addc.u32 %2, %2, 0;\n\t"
            "mad.lo.cc.u32 %0, %4, %5, %0;\n\t"
            "madc.hi.cc.u32 %1, %4, %5, %1;\n\t"
            "addc.u32 %2, %2, 0;"
            : "+r"(odd[0]), "+r"(odd[1]), "+r"(odd[2])
            : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
    }

    __device__ U128 sum() const {
        const U128 low =
            (U128{even[3]} << 96) | (U128{even[2]} << 64) | (U128{even[1]} << 32) | even[0];
        return low + ((U128{odd[2]} << 96) | (U128{odd[1]} << 64) | (U128{odd[0]} << 32));
    }
};

__device__ inline U128 shuffled(U128 value, int mask) {
    const auto low = static_cast<unsigned long long>(value);
    const auto high = static_cast<unsigned long long>(value >> 64);
    return (U128{__shfl_xor_sync(kAllLanes, high, mask)} << 64) |
           __shfl_xor_sync(kAllLanes, low, mask);
}

// Sums four chunks over all lanes: lane i returns the sum of chunk i % 4. The first steps exchange
// two chunks each, so that less than half of the words move.
__device__ inline U128 summed(const U128 (&chunk)[kSums], std::uint32_t lane) {
    const bool odd = lane & 1, high = lane & 2;
    const U128 first = (odd ? chunk[1] : chunk[0]) + shuffled(odd ? chunk[0] : chunk[1], 1);
    const U128 second = (odd ? chunk[3] : chunk[2]) + shuffled(odd ? chunk[2] : chunk[3], 1);
    U128 sum = (high ? second : first) + shuffled(high ? first : second, 2);
    for (int mask = 4; mask < 32; mask *= 2) {
        sum += shuffled(sum, mask);
    }
    return sum;
}

// Returns the sum of all lanes mod 2^127 - 1, for values below 2^127 - 1.
__device__ inline U128 reduced_sum(U128 value) {
    for (int mask = 1; mask < 32; mask *= 2) {
        value = reduced(value + shuffled(value, mask));
    }
    return value;
}

__device__ inline uint4 load_once(const uint4* from) {
    return __ldcs(from);
}

template <Way way>
__device__ inline void store(uint4* to, uint4 value) {
    if constexpr (way == Way::kScatter) {
        __stcs(to, value);
    } else if constexpr (way == Way::kGather) {
        *to = value;  // a copy engine reads it next, from the cache
    }
}

// State of a warp that reads and writes device memory by bulk copies. It has two buffers: one step
// is read while the step before it is summed and written.
struct Ring {
    std::uint32_t buffers;   // addresses in shared memory
    std::uint32_t barriers;  // one per buffer
    std::uint32_t phases;    // one bit per buffer
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AIOKV_BULK_COPIES 1
constexpr bool kHasBulkCopies = true;

__device__ inline void begin_load(const Ring& ring, std::uint32_t stage, const void* from) {
    const std::uint32_t barrier = ring.barriers + 8 * stage;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(kChunkBytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(ring.buffers + stage * kChunkBytes),
        "l"(from), "r"(kChunkBytes), "r"(barrier)
        : "memory");
}

__device__ inline void end_load(Ring& ring, std::uint32_t stage) {
    const std::uint32_t barrier = ring.barriers + 8 * stage, phase = ring.phases >> stage & 1;
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra WAIT;\n\t}" ::"r"(barrier),
        "r"(phase)
        : "memory");
    ring.phases ^= 1u << stage;
}

__device__ inline void begin_store(const Ring& ring, std::uint32_t stage, void* to) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(ring.buffers + stage * kChunkBytes), "r"(kChunkBytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ inline uint4 loaded(const Ring& ring, std::uint32_t stage, std::uint32_t vector) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(ring.buffers + stage * kChunkBytes + 16 * vector));
    return value;
}
#else
constexpr bool kHasBulkCopies = false;
#endif

// Returns the address of a step of a unit, in the device blocks or in the slot.
template <Way way>
__device__ inline std::uint8_t* block_step(const SlotPass& pass, const PassRow& row,
                                           std::size_t step) {
    const Step at = pass.steps[step];
    return reinterpret_cast<std::uint8_t*>(at.base +
                                           static_cast<std::size_t>(row.device_id) * at.stride);
}

// Does the same as run_unit for a unit of whole steps.
template <Way way>
__device__ inline U128 run_unit_in_bulk(const SlotPass& pass, const PassRow& row,
                                        std::uint32_t unit, std::uint32_t num_steps,
                                        const uint4 (&keys)[2], std::uint32_t lane, Ring& ring) {
    U128 mine = 0;
#ifdef AIOKV_BULK_COPIES
    const std::size_t first = static_cast<std::size_t>(unit) * (kUnitBytes / kChunkBytes);
    std::uint8_t* const slot = pass.slots + static_cast<std::size_t>(row.slot) * pass.pitch +
                               static_cast<std::size_t>(unit) * kUnitBytes;
    const auto source = [&](std::uint32_t step) {
        return way == Way::kGather ? block_step<way>(pass, row, first + step)
                                   : slot + step * kChunkBytes;
    };
    if (lane == 0) {
        begin_load(ring, 0, source(0));
        if (num_steps > 1) {
            begin_load(ring, 1, source(1));
        }
    }
    for (std::uint32_t step = 0; step < num_steps; ++step) {
        const std::uint32_t stage = step % 2;
        end_load(ring, stage);
        if constexpr (way != Way::kRead) {
            if (lane == 0) {
                begin_store(ring, stage,
                            way == Way::kGather ? slot + step * kChunkBytes
                                                : block_step<way>(pass, row, first + step));
            }
        }
        U128 chunks[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            Products products;
            products.add(loaded(ring, stage, 64 * i + lane), keys[0]);
            products.add(loaded(ring, stage, 64 * i + 32 + lane), keys[1]);
            chunks[i] = products.sum();
        }
        __syncwarp();  // all lanes have read the buffer
        if (lane == 0 && step + 2 < num_steps) {
            if constexpr (way != Way::kRead) {
                asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            }
            begin_load(ring, stage, source(step + 2));
        }
        const U128 sum = summed(chunks, lane);
        mine = lane / kSums == step ? sum : mine;
    }
    if constexpr (way != Way::kRead) {
        if (lane == 0) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        }
        __syncwarp();
    }
#endif
    return mine;
}

// Copies and sums a unit of a row. All lanes return its polynomial, in which the last chunk has
// weight 1.
template <Way way, bool bulk>
__device__ inline U128 run_unit(const SlotPass& pass, const PassRow& row, std::uint32_t unit,
                                const uint4 (&keys)[2], std::uint32_t lane, Ring& ring) {
    const std::size_t begin = static_cast<std::size_t>(unit) * kUnitBytes;
    const std::size_t left = pass.payload_bytes - begin;
    const auto bytes = static_cast<std::uint32_t>(left < kUnitBytes ? left : kUnitBytes);
    std::uint8_t* const slot = pass.slots + static_cast<std::size_t>(row.slot) * pass.pitch + begin;
    U128 mine = 0;  // NH of chunk `lane` of the unit
    const std::uint32_t in_bulk = bulk && kHasBulkCopies ? bytes / kChunkBytes : 0;
    if (in_bulk > 0) {
        mine = run_unit_in_bulk<way>(pass, row, unit, in_bulk, keys, lane, ring);
    }
    for (std::uint32_t step = in_bulk; step * kChunkBytes < bytes; ++step) {
        const std::uint32_t offset = step * kChunkBytes;
        const auto* from = reinterpret_cast<const uint4*>(slot + offset) + lane;
        uint4* to = nullptr;
        if constexpr (way != Way::kRead) {
            auto* const block =
                reinterpret_cast<uint4*>(block_step<way>(pass, row, begin / kChunkBytes + step)) +
                lane;
            to = way == Way::kGather ? reinterpret_cast<uint4*>(slot + offset) + lane : block;
            from = way == Way::kGather ? block : from;
        }
        const std::uint32_t vectors = (bytes - offset) / sizeof(uint4);  // to the end
        U128 chunks[kSums];
        if (vectors >= kVectors * 32) {
            uint4 values[kVectors];
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                values[i] = load_once(from + 32 * i);
            }
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                store<way>(to + 64 * i, values[2 * i]);
                store<way>(to + 64 * i + 32, values[2 * i + 1]);
                Products products;
                products.add(values[2 * i], keys[0]);
                products.add(values[2 * i + 1], keys[1]);
                chunks[i] = products.sum();
            }
        } else {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                Products products;
                for (int half = 0; half < 2; ++half) {
                    const std::uint32_t vector = 64 * i + 32 * half;
                    if (vector + lane < vectors) {
                        const uint4 value = load_once(from + vector);
                        store<way>(to + vector, value);
                        products.add(value, keys[half]);
                    }
                }
                chunks[i] = products.sum();
            }
        }
        const U128 sum = summed(chunks, lane);
        mine = lane / kSums == step ? sum : mine;
    }
    const std::uint32_t chunks = (bytes + Checksum::kChunkBytes - 1) / Checksum::kChunkBytes;
    const U128 term =
        lane < chunks ? multiplied(reduced(mine), pass.constants->powers[chunks - 1 - lane]) : 0;
    return reduced_sum(term);
}

// Returns, in all lanes, the checksum of a row and of its header. All units of the row must be
// summed.
__device__ inline U128 combined(const SlotPass& pass, std::uint32_t row, const uint4 (&header)[3],
                                std::uint32_t lane) {
    const SumConstants& constants = *pass.constants;
    const U128* sums = pass.sums + static_cast<std::size_t>(row) * pass.units;
    const auto whole = static_cast<std::uint32_t>(pass.payload_bytes / kUnitBytes);
    U128 term = 0;
    std::uint32_t last = lane;
    for (std::uint32_t unit = lane; unit < whole; unit += 32) {
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(sums + unit));
        const U128 sum =
            (U128{words.w} << 96) | (U128{words.z} << 64) | (U128{words.y} << 32) | words.x;
        term = reduced(multiplied(term, constants.unit_powers[32]) + sum);
        last = unit;
    }
    if (lane < whole) {
        term = multiplied(term, constants.unit_powers[whole - 1 - last]);
    }
    U128 sum = reduced_sum(term);
    if (whole < pass.units) {
        const auto bytes =
            static_cast<std::uint32_t>(pass.payload_bytes - std::size_t{whole} * kUnitBytes);
        const std::uint32_t chunks = (bytes + Checksum::kChunkBytes - 1) / Checksum::kChunkBytes;
        const uint4 words = __ldcg(reinterpret_cast<const uint4*>(sums + whole));
        const U128 tail =
            (U128{words.w} << 96) | (U128{words.z} << 64) | (U128{words.y} << 32) | words.x;
        sum = reduced(multiplied(sum, constants.powers[chunks]) + tail);
    }
    const auto* keys = reinterpret_cast<const uint4*>(constants.words);
    Products products;
    for (int i = 0; i < 3; ++i) {
        products.add(header[i], keys[i]);
    }
    return reduced(multiplied(sum, constants.powers[1]) + reduced(products.sum()));
}

__device__ inline uint4 vector_of(std::uint64_t first, std::uint64_t second) {
    return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(first >> 32),
            static_cast<std::uint32_t>(second), static_cast<std::uint32_t>(second >> 32)};
}

__device__ inline bool equal(uint4 a, uint4 b) {
    return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w;
}

// Writes the trailer of a row, or compares the row's trailer with the expected one.
__device__ inline void end_row(const SlotPass& pass, std::uint32_t index, std::uint32_t lane) {
    const PassRow& row = pass.rows[index];
    const uint4 header[3] = {
        vector_of(kTrailerMagic | std::uint64_t{kTrailerVersion} << 32, pass.payload_bytes),
        vector_of(row.key[0], row.key[1]), vector_of(row.key[2], row.key[3])};
    const U128 sum = combined(pass, index, header, lane);
    if (lane == 0) {
        auto* trailer = reinterpret_cast<uint4*>(
            pass.slots + static_cast<std::size_t>(row.slot) * pass.pitch + pass.payload_bytes);
        const uint4 checksum =
            vector_of(static_cast<std::uint64_t>(sum), static_cast<std::uint64_t>(sum >> 64));
        if (pass.results == nullptr) {
            trailer[0] = header[0];
            trailer[1] = header[1];
            trailer[2] = header[2];
            trailer[3] = checksum;
        } else {
            const bool right = equal(trailer[0], header[0]) && equal(trailer[1], header[1]) &&
                               equal(trailer[2], header[2]) && equal(trailer[3], checksum);
            const StoreResult result = right ? StoreResult::kDone : StoreResult::kWrong;
            pass.results[index] = static_cast<std::uint32_t>(result);
        }
        pass.arrived[index] = 0;
    }
}

template <Way way, bool bulk>
__global__ void __launch_bounds__(kSumThreads) slot_kernel(const __grid_constant__ SlotPass pass) {
    const std::uint32_t lane = threadIdx.x % 32;
    Ring ring{};
#ifdef AIOKV_BULK_COPIES
    extern __shared__ __align__(128) std::uint8_t buffers[];
    __shared__ __align__(8) std::uint64_t barriers[kSumThreads / 32][2];
    if constexpr (bulk) {
        const std::uint32_t warp = threadIdx.x / 32;
        ring.buffers =
            static_cast<std::uint32_t>(__cvta_generic_to_shared(buffers)) + warp * 2 * kChunkBytes;
        ring.barriers = static_cast<std::uint32_t>(__cvta_generic_to_shared(barriers[warp]));
        if (lane == 0) {
            for (std::uint32_t stage = 0; stage < 2; ++stage) {
                asm volatile(
                    "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.barriers + 8 * stage)
                    : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
    }
#endif
    const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const std::uint32_t step = gridDim.x * blockDim.x / 32;
    const auto* words = reinterpret_cast<const uint4*>(pass.constants->words);
    const uint4 keys[2] = {words[lane], words[lane + 32]};
    for (std::uint32_t index = first; index < pass.num_rows * pass.units; index += step) {
        const std::uint32_t row = index / pass.units;
        const U128 sum =
            run_unit<way, bulk>(pass, pass.rows[row], index % pass.units, keys, lane, ring);
        std::uint32_t earlier = 0;
        if (lane == 0) {
            reinterpret_cast<uint4*>(pass.sums)[index] =
                vector_of(static_cast<std::uint64_t>(sum), static_cast<std::uint64_t>(sum >> 64));
            __threadfence();
            earlier = atomicAdd(pass.arrived + row, 1);
            __threadfence();
        }
        if (__shfl_sync(kAllLanes, earlier, 0) == pass.units - 1) {
            end_row(pass, row, lane);
        }
    }
}

template <Way way>
__global__ void __launch_bounds__(kThreads)
    slot_copy_kernel(const __grid_constant__ SlotPass pass,
                     const __grid_constant__ KernelCopy copy) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const std::uint32_t step = gridDim.x * blockDim.x / 32;
    const std::uint32_t per_row = copy.num_slices * copy.chunks_per_slice;
    for (std::uint32_t index = first; index < pass.num_rows * per_row; index += step) {
        const PassRow& row = pass.rows[index / per_row];
        KernelCopy one = copy;  // copies a single row
        one.device_ids = &row.device_id;
        one.num_rows = 1;
        one.rows = {pass.slots, &row.slot, pass.pitch, 0};
        const Chunk chunk = locate(one, index % per_row);
        if (way == Way::kScatter) {
            to_device(chunk, lane);
        } else {
            to_host(chunk, lane);
        }
    }
}

template <Way way>
void launch(const SlotPass& pass, int blocks, bool bulk, cudaStream_t stream) {
    if (bulk) {
        slot_kernel<way, true><<<blocks, kSumThreads, kRingBytes, stream>>>(pass);
    } else {
        slot_kernel<way, false><<<blocks, kSumThreads, 0, stream>>>(pass);
    }
}

template <Way way>
void allow_ring() {
    check(cudaFuncSetAttribute(slot_kernel<way, true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kRingBytes),
          "cudaFuncSetAttribute");
}

}  // namespace

bool prepare_bulk_copies() {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, slot_kernel<Way::kRead, true>),
          "cudaFuncGetAttributes");
    if (attributes.ptxVersion < 90) {
        return false;
    }
    allow_ring<Way::kRead>();
    allow_ring<Way::kGather>();
    allow_ring<Way::kScatter>();
    return true;
}

void launch_slot_pass(const SlotPass& pass, Way way, int blocks, bool bulk, cudaStream_t stream) {
    switch (way) {
        case Way::kRead:
            launch<Way::kRead>(pass, blocks, bulk, stream);
            break;
        case Way::kGather:
            launch<Way::kGather>(pass, blocks, bulk, stream);
            break;
        case Way::kScatter:
            launch<Way::kScatter>(pass, blocks, bulk, stream);
            break;
    }
    check_launch("slot kernel");
}

void launch_slot_copy(const SlotPass& pass, KernelCopy copy, Way way, int blocks,
                      cudaStream_t stream) {
    if (way == Way::kScatter) {
        slot_copy_kernel<Way::kScatter><<<blocks, kThreads, 0, stream>>>(pass, copy);
    } else {
        slot_copy_kernel<Way::kGather><<<blocks, kThreads, 0, stream>>>(pass, copy);
    }
    check_launch("slot copy kernel");
}

}  // namespace aiokv::cuda
