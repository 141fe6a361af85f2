// Slots in device memory, through which blocks move from and to GPUs of other processes.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "aiokv/cuda_events.hpp"
#include "aiokv/cuda_layout.hpp"
#include "aiokv/cuda_slot_kernels.hpp"
#include "aiokv/cuda_transfer.hpp"

namespace aiokv::cuda {

// Memory of one GPU that another process on the same machine can map.
class DeviceMemory {
  public:
    using Handle = std::array<std::uint8_t, sizeof(cudaIpcMemHandle_t)>;

    DeviceMemory(int device, std::size_t num_bytes);
    ~DeviceMemory();  // calls close()
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
    std::size_t num_bytes() const { return num_bytes_; }
    int device() const { return device_; }
    Handle handle() const;
    // Frees the memory, which no process may have mapped any more. Idempotent.
    void close();

  private:
    const int device_;
    const std::size_t num_bytes_;
    void* memory_ = nullptr;
};

// Returns the handle with which another process can map the allocation that begins at this address.
DeviceMemory::Handle memory_handle(int device, std::uintptr_t address);

// Memory of another process, mapped for the copies of one GPU.
class MappedMemory {
  public:
    MappedMemory(int device, const DeviceMemory::Handle& handle);
    ~MappedMemory();  // calls close()
    MappedMemory(const MappedMemory&) = delete;
    MappedMemory& operator=(const MappedMemory&) = delete;

    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
    // Unmaps the memory. No copy into it may be in progress. Idempotent.
    void close();

  private:
    const int device_;
    void* memory_ = nullptr;
};

// Mapped host memory for the results of passes. Each loan has `num_results` numbers.
class ResultPool {
  public:
    struct Loan {
        std::uint32_t* host = nullptr;
        std::uint32_t* device = nullptr;
    };

    ResultPool(int device, std::size_t num_results);
    ~ResultPool();
    ResultPool(const ResultPool&) = delete;
    ResultPool& operator=(const ResultPool&) = delete;

    Loan take();
    void give(Loan loan);

  private:
    const int device_;
    const std::size_t num_results_;
    std::mutex mutex_;
    std::vector<Loan> all_;
    std::vector<Loan> free_;
};

// Submitted work on one stream, and the event at its end.
class SlotWork {
  public:
    // `pool` provides memory for `num_results` results; null if there are none.
    SlotWork(std::shared_ptr<EventPool> events, std::shared_ptr<Health> health,
             std::shared_ptr<ResultPool> pool = nullptr, std::size_t num_results = 0);
    ~SlotWork();  // waits for the end, if there are results
    SlotWork(const SlotWork&) = delete;
    SlotWork& operator=(const SlotWork&) = delete;

    // Returns true if the work has ended or failed; a failure breaks the device. Call from any
    // thread.
    bool done();
    void synchronize();
    void stream_wait(cudaStream_t stream);
    std::optional<Failure> failure() const;
    // Returns a StoreResult per verified slot. All of them are kWrong before the end and after a
    // failure.
    std::vector<std::uint8_t> results();

    // For the engine: mapped memory of the results.
    std::uint32_t* results_on_device() const { return results_.device; }
    void submitted(cudaStream_t stream);

  private:
    std::shared_ptr<EventPool> events_;
    std::shared_ptr<Health> health_;
    std::shared_ptr<ResultPool> pool_;
    std::size_t num_results_;
    ResultPool::Loan results_;
    cudaEvent_t event_ = nullptr;
    std::atomic<bool> done_{false};
};

struct SlotOptions {
    int device = 0;
    int blocks = 8;    // CTAs of a pass
    bool bulk = true;  // bulk copies, where the GPU has them
};

// Passes between device blocks and slots that also seal or verify the slots. The caller's thread
// submits a pass, in microseconds.
class SlotEngine {
  public:
    // The slots are the host blocks of the layout, with trailers behind them. `send` is the stream
    // of gathers, `receive` that of the other passes.
    SlotEngine(Layout layout, SlotOptions options, cudaStream_t send, cudaStream_t receive);
    ~SlotEngine();  // calls close()
    SlotEngine(const SlotEngine&) = delete;
    SlotEngine& operator=(const SlotEngine&) = delete;

    using Ids = std::span<const std::int32_t>;
    using Keys = std::span<const std::uint8_t>;  // 32 bytes per slot
    using Work = std::shared_ptr<SlotWork>;

    // All throw UsageError with nothing submitted, DeviceError when the device is broken.
    // Copies blocks to slots, and seals the slots.
    Work gather(Ids device_ids, Ids slots, Keys keys, cudaEvent_t after);
    // Verifies slots.
    Work verify(Ids slots, Keys keys);
    // Copies slots to blocks and verifies the copied bytes. The block of a wrong slot then has
    // wrong bytes.
    Work scatter_verified(Ids slots, Ids device_ids, Keys keys, cudaEvent_t after);

    // Waits for the submitted passes, and frees the memory. Idempotent.
    void close();
    const Health& health() const { return *health_; }
    // True if one pass copies and sums; false if slots are read twice.
    bool fused() const { return !steps_.empty(); }

  private:
    struct Lane {  // numbers that belong to a stream
        cudaStream_t stream = nullptr;
        mersenne::U128* sums = nullptr;
        std::uint32_t* arrived = nullptr;
    };
    struct Rows {
        Ids slots;
        Ids device_ids;  // empty: none
        Keys keys;
    };

    Work run(Lane& lane, Way way, const Rows& rows, bool verifies, cudaEvent_t after);
    void submit(Lane& lane, const SlotPass& pass, Way way);
    static void check_pairs(Ids slots, Ids device_ids);
    static void check_keys(Ids slots, Keys keys);
    void make_steps();
    void allocate(Lane& lane, cudaStream_t stream);

    const Layout layout_;
    const SlotOptions options_;
    std::shared_ptr<EventPool> events_;
    std::shared_ptr<Health> health_;
    std::shared_ptr<ResultPool> results_;
    std::mutex mutex_;  // held while copies are submitted
    IdCheck ids_;
    std::uint32_t units_ = 0;
    bool bulk_ = false;
    std::vector<Step> steps_;
    Step* device_steps_ = nullptr;
    Slice* device_slices_ = nullptr;
    SumConstants* constants_ = nullptr;
    Lane send_;
    Lane receive_;
    bool closed_ = false;
};

// A contiguous copy between memory of this GPU and mapped memory of another process.
struct PeerCopy {
    std::uintptr_t target;
    std::uintptr_t source;
    std::size_t num_bytes;
};

// Copies of one GPU's copy engines, in order, on a stream of their own.
class PeerCopies {
  public:
    explicit PeerCopies(int device);
    ~PeerCopies();  // calls close()
    PeerCopies(const PeerCopies&) = delete;
    PeerCopies& operator=(const PeerCopies&) = delete;

    // Submits copies that start after all earlier ones and, if given, `after`. Copies between
    // neighbouring slots become one copy, which also overwrites the gap of up to 4 KiB between
    // them.
    std::shared_ptr<SlotWork> copy(std::span<const PeerCopy> copies, SlotWork* after);
    // Waits for all copies. Idempotent.
    void close();

  private:
    const int device_;
    cudaStream_t stream_ = nullptr;
    std::shared_ptr<EventPool> events_;
    std::shared_ptr<Health> health_;
    std::mutex mutex_;
};

}  // namespace aiokv::cuda
