// One transfer: which layers are submitted, which have finished, and its failure.
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

// The ids of a transfer. The lane's thread sorts them and plans the copies.
struct Request {
    Direction direction;
    std::vector<std::int32_t> host_ids;
    std::vector<std::int32_t> device_ids;
    cudaEvent_t after = nullptr;  // null: nothing to wait for
    Path path = Path::kAuto;
};

// CUDA reports an event that was never recorded as done. So each query of a layer first checks that
// the layer is submitted, which the lane sets only after it has recorded the event.
class Transfer {
  public:
    Transfer(Request request, std::uint32_t num_layers, std::shared_ptr<EventPool> events,
             std::shared_ptr<Health> health);
    ~Transfer();
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // --- any thread ---
    std::uint32_t num_layers() const { return num_layers_; }
    // Returns true if the layer has finished or, after a failure, if no byte of the transfer moves
    // any more.
    bool layer_done(std::uint32_t layer);
    // Blocks until the layer is submitted, for at most `seconds`. Returns false at the timeout.
    // Throws DeviceError if the layer will never be submitted.
    bool wait_submitted(std::uint32_t layer, std::optional<double> seconds = std::nullopt);
    // Blocks until layer_done().
    void synchronize(std::uint32_t layer);
    // Calls wait_submitted(), then lets the stream wait. Throws UsageError during graph capture.
    void stream_wait(std::uint32_t layer, cudaStream_t stream);
    std::optional<Failure> failure() const;
    // Returns the time from the first command of the transfer to the end of the layer; negative
    // without timing.
    float layer_milliseconds(std::uint32_t layer);
    // Returns the layers that become usable together; empty until they are planned.
    std::vector<Group> groups() const;
    // Returns true if the `after` event was handed to the device and may be reused.
    bool started() const { return started_.load(std::memory_order_acquire); }

    // --- the lane ---
    const Request& request() const { return request_; }
    void plan(std::vector<Group> groups);
    void start(cudaStream_t stream);
    void submitted(std::size_t group, cudaStream_t stream);
    // Ends the transfer early. The submitted work ends with `last`, if given.
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
