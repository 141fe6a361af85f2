// One direction of the engine: a submitting thread, its streams and its staging ring.
#pragma once

#include <cuda_runtime_api.h>
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "aiokv/cuda_kernels.hpp"
#include "aiokv/cuda_registration.hpp"
#include "aiokv/cuda_transfer.hpp"
#include "aiokv/error.hpp"

namespace aiokv::cuda {

struct EngineOptions {
    int device = 0;
    bool timing = false;
    std::size_t slot_bytes = std::size_t{64} << 20;
    std::uint32_t num_slots = 2;      // slots of the staging ring
    std::uint32_t queued_pieces = 8;  // pieces submitted ahead
    int staged_blocks = 8;            // CTAs of scatter and gather: 350 GB/s, six times the link
    int direct_blocks = 3;            // CTAs across the link: enough for large slices
    double link_bytes_per_second = 50e9;  // only to guess when a slot frees
    PlannerOptions planner;
};

// Streams that the caller creates: non-blocking, none of the default streams.
struct LaneStreams {
    cudaStream_t copy;
    cudaStream_t kernel;
};

// State that both lanes share; it is destroyed after them.
struct LaneContext {
    const Layout& layout;
    const EngineOptions& options;
    const Slice* device_slices;  // device memory
    HostRegistration& host;
    std::shared_ptr<EventPool> events;
    std::shared_ptr<Health> health;
};

// Ids of one transfer, page-locked and on the device.
class IdBuffer {
  public:
    IdBuffer(std::size_t capacity, EventPool& events);
    ~IdBuffer();
    IdBuffer(const IdBuffer&) = delete;
    IdBuffer& operator=(const IdBuffer&) = delete;

    // Waits until the transfer that used the buffer last no longer needs it, then uploads the ids.
    void upload(std::span<const std::int32_t> device_ids, std::span<const std::int32_t> host_ids,
                cudaStream_t stream);
    void release(cudaStream_t stream);
    const std::int32_t* device_ids() const { return device_; }
    const std::int32_t* host_ids() const { return device_ + capacity_; }

  private:
    std::size_t capacity_;
    EventPool& events_;
    std::int32_t* pinned_ = nullptr;
    std::int32_t* device_ = nullptr;
    cudaEvent_t free_ = nullptr;
    bool used_ = false;
};

class Lane {
  public:
    Lane(Direction direction, LaneContext context, LaneStreams streams);
    ~Lane();  // calls close()
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    void submit(std::shared_ptr<Transfer> transfer);
    // Submits the queued transfers, waits for the device and joins the thread. Idempotent.
    void close();
    // CPU time of the submitting thread since it started.
    double cpu_seconds() const;
    // For tests: while `held` is true, no further piece is submitted.
    void hold(bool held);
    // For tests: the next piece with this layer fails with this CUDA code.
    void fail_at(std::uint32_t layer, int code);

  private:
    struct Piece {
        cudaEvent_t crossed;  // first half done: in staging
        cudaEvent_t done;
        std::size_t bytes = 0;
        double expected_end = 0.0;
    };
    struct Job {  // the transfer at hand, in the lane's order
        Transfer* transfer;
        std::vector<std::int32_t> host_ids;    // sorted
        std::vector<std::int32_t> device_ids;  // in the same order
        IdBuffer* ids;
    };

    void run();
    std::shared_ptr<Transfer> next();
    void execute(Transfer& transfer);
    void submit_groups(Job& job);
    void submit_group(Job& job, const Group& group);
    void submit_piece(Job& job, const Group& group, std::size_t first_row, std::size_t num_rows);
    void gate(const Group& group);
    Piece& piece(std::size_t number) { return pieces_[number % pieces_.size()]; }
    std::uint8_t* take_slot(cudaStream_t first_stream);
    void pace();
    void wait_for(std::size_t number);
    void note_submitted(std::size_t bytes);
    void copy_rows(const Job& job, Window window, std::size_t first_row, std::size_t num_rows,
                   std::uint8_t* staging);
    KernelCopy kernel_copy(const Job& job, const Group& group, std::size_t first_row,
                           std::size_t num_rows, Rows rows) const;
    void settle(Transfer& transfer, const DeviceError& error);
    void settle_failure(Transfer& transfer, const DeviceError& error);
    std::uint32_t first_bad_block() const;
    cudaStream_t last_stream() const;
    void free_resources();

    const Direction direction_;
    const LaneContext context_;
    const LaneStreams streams_;
    std::vector<Piece> pieces_;  // the latest pieces, at most as many as may be queued
    std::vector<std::unique_ptr<IdBuffer>> id_buffers_;
    std::uint8_t* staging_ = nullptr;
    std::vector<std::size_t> slot_users_;  // number of the last piece in each slot, plus 1
    std::size_t next_slot_ = 0;
    std::size_t slot_bytes_ = 0;
    std::size_t next_piece_ = 0;
    std::size_t moved_pieces_ = 0;  // pieces that this thread has seen done
    std::size_t next_ids_ = 0;
    double expected_end_ = 0.0;
    double link_rate_;              // bytes per second
    std::vector<HostCopy> copies_;  // reused from piece to piece

    // How far the transfer at hand has come, for its failure.
    std::vector<std::uint32_t> order_;  // sorted position to index in the request
    IdBuffer* ids_ = nullptr;
    std::size_t rows_submitted_ = 0;
    bool last_group_ = false;

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Transfer>> queue_;
    bool closing_ = false;
    bool held_ = false;
    int fail_layer_ = -1;
    int fail_code_ = 0;
    std::thread thread_;
    clockid_t thread_clock_ = 0;
    double final_cpu_seconds_ = 0.0;  // kept when the thread, and with it its clock, ends
};

}  // namespace aiokv::cuda
