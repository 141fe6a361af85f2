// One transfer: what of it is on the stream, what has finished, and how it failed.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "aiokv/cuda_events.hpp"
#include "aiokv/cuda_planner.hpp"
#include "aiokv/direction.hpp"

namespace aiokv::cuda {

struct Failure {
    std::uint32_t first_bad_block;  // index into the ids as submitted
    int code;
    std::string reason;
};

// The ids, moved to the lane's thread; sorted and planned there.
struct Request {
    Direction direction;
    std::vector<std::int32_t> host_ids;
    std::vector<std::int32_t> device_ids;
    cudaEvent_t after = nullptr;  // null: nothing to wait for
    Path path = Path::kAuto;
};

// To CUDA an event that was never recorded is done. So every question about a layer first looks
// whether the layer is submitted, which the lane says only after it has recorded the event.
class Transfer {
  public:
    Transfer(Request request, std::uint32_t num_layers, std::shared_ptr<EventPool> events,
             std::shared_ptr<Health> health);
    ~Transfer();
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // --- any thread ---
    std::uint32_t num_layers() const { return num_layers_; }
    // True once the layer has finished or, after a failure, once nothing of the transfer moves.
    bool layer_done(std::uint32_t layer);
    // Blocks until the layer is on its stream, or for `seconds`, whose end returns false. Throws
    // DeviceError when the layer never will be.
    bool wait_submitted(std::uint32_t layer, std::optional<double> seconds = std::nullopt);
    // Blocks until layer_done().
    void synchronize(std::uint32_t layer);
    // wait_submitted(), then the stream waits. Throws UsageError during graph capture.
    void stream_wait(std::uint32_t layer, cudaStream_t stream);
    std::optional<Failure> failure() const;
    // From the first command of the transfer to the end of the layer; negative without timing.
    float layer_milliseconds(std::uint32_t layer);
    // Layers that become usable together; empty until planned.
    std::vector<Group> groups() const;
    // The `after` event has been handed to the device and may be reused.
    bool started() const { return started_.load(std::memory_order_acquire); }

    // --- the lane ---
    const Request& request() const { return request_; }
    void plan(std::vector<Group> groups);
    void start(cudaStream_t stream);
    void submitted(std::size_t group, cudaStream_t stream);
    // Nothing more will be submitted; what was ends with `last`, when given.
    void fail(Failure failure, std::optional<cudaStream_t> last);

  private:
    bool query(cudaEvent_t event);
    void check_layer(std::uint32_t layer) const;

    Request request_;
    const std::uint32_t num_layers_;
    std::shared_ptr<EventPool> events_;
    std::shared_ptr<Health> health_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Group> groups_;
    std::vector<std::uint32_t> group_of_layer_;
    std::vector<cudaEvent_t> group_events_;
    cudaEvent_t start_event_ = nullptr;
    std::atomic<cudaEvent_t> last_event_{nullptr};
    std::optional<Failure> failure_;
    std::atomic<std::uint32_t> submitted_groups_{0};
    std::atomic<std::uint32_t> done_groups_{0};  // prefix known to have finished
    std::atomic<bool> started_{false};
    std::atomic<bool> ended_by_failure_{false};
};

}  // namespace aiokv::cuda
