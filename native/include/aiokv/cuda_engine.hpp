// The staged swap engine of one GPU: two lanes over one layout.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "aiokv/cuda_lane.hpp"

namespace aiokv::cuda {

class SwapEngine {
  public:
    // `host` must cover the layout's host pool and outlive the engine.
    SwapEngine(Layout layout, EngineOptions options, LaneStreams onload, LaneStreams offload,
               HostRegistration& host);
    ~SwapEngine();  // calls close()
    SwapEngine(const SwapEngine&) = delete;
    SwapEngine& operator=(const SwapEngine&) = delete;

    // Checks all ids, then hands the transfer to its lane. Takes microseconds and calls no driver
    // function. Throws UsageError, changing nothing, or DeviceError when the device is broken.
    std::shared_ptr<Transfer> submit(Direction direction, std::span<const std::int32_t> host_ids,
                                     std::span<const std::int32_t> device_ids, cudaEvent_t after,
                                     Path path);
    // Finishes the submitted transfers, joins the threads and frees device memory. Idempotent.
    void close();

    Lane& lane(Direction direction);
    // Returns the layers that become usable together. They depend on sizes only, so they are known
    // before any transfer.
    std::vector<Group> groups(Direction direction) const;
    const Health& health() const { return *health_; }
    double cpu_seconds() const;

  private:
    const Layout layout_;
    const EngineOptions options_;
    HostRegistration& host_;
    std::shared_ptr<EventPool> events_;
    std::shared_ptr<Health> health_;
    IdCheck ids_;
    Slice* device_slices_ = nullptr;
    std::unique_ptr<Lane> onload_;
    std::unique_ptr<Lane> offload_;
    bool closed_ = false;
};

}  // namespace aiokv::cuda
