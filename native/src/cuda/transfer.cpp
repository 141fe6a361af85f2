#include "aiokv/cuda_transfer.hpp"

#include <chrono>
#include <utility>

#include "aiokv/cuda_check.hpp"

namespace aiokv::cuda {

Transfer::Transfer(Request request, std::uint32_t num_layers, std::shared_ptr<EventPool> events,
                   std::shared_ptr<Health> health)
    : request_(std::move(request)),
      num_layers_(num_layers),
      events_(std::move(events)),
      health_(std::move(health)) {}

Transfer::~Transfer() {
    for (cudaEvent_t event : group_events_) {
        events_->give(event);
    }
    for (cudaEvent_t event : {start_event_, last_event_.load()}) {
        if (event != nullptr) {
            events_->give(event);
        }
    }
}

void Transfer::check_layer(std::uint32_t layer) const {
    if (layer >= num_layers_) {
        throw UsageError("layer " + std::to_string(layer) + " is not in [0, " +
                         std::to_string(num_layers_) + ")");
    }
}

bool Transfer::query(cudaEvent_t event) {
    const cudaError_t code = cudaEventQuery(event);
    if (code == cudaSuccess) {
        return true;
    }
    cudaGetLastError();
    if (code == cudaErrorNotReady) {
        return false;
    }
    const std::string reason = describe(code, "asking for the end of a transfer");
    health_->break_with(static_cast<int>(code), reason);
    fail({0, static_cast<int>(code), reason}, std::nullopt);
    return true;
}

bool Transfer::layer_done(std::uint32_t layer) {
    check_layer(layer);
    const std::uint32_t submitted = submitted_groups_.load(std::memory_order_acquire);
    // All groups are planned before the first one is submitted, and do not change afterwards.
    if (submitted > 0 && group_of_layer_[layer] < submitted) {
        const std::uint32_t group = group_of_layer_[layer];
        std::uint32_t done = done_groups_.load(std::memory_order_relaxed);
        if (group < done) {
            return true;
        }
        if (!query(group_events_[group])) {
            return false;
        }
        while (done < group + 1 && !done_groups_.compare_exchange_weak(done, group + 1)) {
        }
        return true;
    }
    if (!ended_by_failure_.load(std::memory_order_acquire)) {
        return false;
    }
    cudaEvent_t last = last_event_.load();
    return last == nullptr || query(last);
}

bool Transfer::wait_submitted(std::uint32_t layer, std::optional<double> seconds) {
    check_layer(layer);
    std::unique_lock lock(mutex_);
    const auto known = [&] {
        return failure_.has_value() ||
               (!groups_.empty() && group_of_layer_[layer] < submitted_groups_.load());
    };
    // A timeout of more than a year would overflow the clock.
    if (!seconds || *seconds > 365.0 * 86400.0) {
        changed_.wait(lock, known);
    } else if (!changed_.wait_for(lock, std::chrono::duration<double>(*seconds), known)) {
        return false;
    }
    if (groups_.empty() || group_of_layer_[layer] >= submitted_groups_.load()) {
        throw DeviceError(
            "layer " + std::to_string(layer) + " will not arrive: " + failure_->reason,
            failure_->code);
    }
    return true;
}

void Transfer::synchronize(std::uint32_t layer) {
    check_layer(layer);
    cudaEvent_t event = nullptr;
    {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] {
            return failure_.has_value() ||
                   (!groups_.empty() && group_of_layer_[layer] < submitted_groups_.load());
        });
        event = !groups_.empty() && group_of_layer_[layer] < submitted_groups_.load()
                    ? group_events_[group_of_layer_[layer]]
                    : last_event_.load();
    }
    if (event != nullptr && cudaEventSynchronize(event) != cudaSuccess) {
        cudaGetLastError();
        query(event);  // reports the error again, which breaks the device
    }
}

void Transfer::stream_wait(std::uint32_t layer, cudaStream_t stream) {
    wait_submitted(layer);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone) {
        throw UsageError(
            "gpu_wait on a stream that is being captured would wait for this transfer in every "
            "replay: call gpu_wait_all(stream) before the graph is launched");
    }
    check(cudaStreamWaitEvent(stream, group_events_[group_of_layer_[layer]], 0),
          "cudaStreamWaitEvent");
}

std::optional<Failure> Transfer::failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
}

float Transfer::layer_milliseconds(std::uint32_t layer) {
    if (!events_->timing() || start_event_ == nullptr || !layer_done(layer) || failure()) {
        return -1.0f;
    }
    float milliseconds = -1.0f;
    check(cudaEventElapsedTime(&milliseconds, start_event_, group_events_[group_of_layer_[layer]]),
          "cudaEventElapsedTime");
    return milliseconds;
}

std::vector<Group> Transfer::groups() const {
    std::lock_guard lock(mutex_);
    return groups_;
}

void Transfer::plan(std::vector<Group> groups) {
    std::lock_guard lock(mutex_);
    groups_ = std::move(groups);
    group_of_layer_.resize(num_layers_);
    for (std::uint32_t i = 0; i < groups_.size(); ++i) {
        for (std::uint32_t layer = groups_[i].first_layer; layer < groups_[i].end_layer; ++layer) {
            group_of_layer_[layer] = i;
        }
        group_events_.push_back(events_->take());
    }
}

void Transfer::start(cudaStream_t stream) {
    if (events_->timing()) {
        start_event_ = events_->take();
        check(cudaEventRecord(start_event_, stream), "cudaEventRecord");
    }
    started_.store(true, std::memory_order_release);
}

void Transfer::submitted(std::size_t group, cudaStream_t stream) {
    check(cudaEventRecord(group_events_[group], stream), "cudaEventRecord");
    {
        std::lock_guard lock(mutex_);
        submitted_groups_.store(static_cast<std::uint32_t>(group + 1), std::memory_order_release);
    }
    changed_.notify_all();
}

void Transfer::fail(Failure failure, std::optional<cudaStream_t> last) {
    {
        std::lock_guard lock(mutex_);
        if (!failure_) {
            failure_ = std::move(failure);
        }
        if (last && last_event_.load() == nullptr) {
            cudaEvent_t event = events_->take();
            if (cudaEventRecord(event, *last) == cudaSuccess) {
                last_event_.store(event);
            } else {
                cudaGetLastError();
                events_->give(event);
            }
        }
        started_.store(true, std::memory_order_release);
        ended_by_failure_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

}  // namespace aiokv::cuda
