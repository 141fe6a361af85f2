// Pooled events, and the health of the device that all transfers share.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace aiokv::cuda {

// Makes a device current for a scope, and then the caller's device again.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int previous_ = -1;
};

// A pool of events. An owner gives its event back when it is destroyed; queries end before that, so
// no query sees another owner's use.
class EventPool {
  public:
    EventPool(int device, bool timing);
    ~EventPool();
    EventPool(const EventPool&) = delete;
    EventPool& operator=(const EventPool&) = delete;

    cudaEvent_t take();
    void give(cudaEvent_t event);
    bool timing() const { return timing_; }

  private:
    int device_;
    bool timing_;
    std::mutex mutex_;
    std::vector<cudaEvent_t> free_;
};

// The first persistent error of the device, such as a fault in a kernel. After it, no result of the
// device is valid, so all waiters must get the error.
class Health {
  public:
    bool broken() const { return code_.load(std::memory_order_acquire) != 0; }
    int code() const { return code_.load(std::memory_order_acquire); }
    std::string reason() const;
    void break_with(int code, const std::string& reason);
    // Throws DeviceError when broken.
    void raise_if_broken() const;

  private:
    mutable std::mutex mutex_;
    std::string reason_;
    std::atomic<int> code_{0};
};

}  // namespace aiokv::cuda
