// Pooled events, and the health of the device that all transfers share.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace aiokv::cuda {

// Makes a device current for a scope; the caller's own choice comes back.
class DeviceScope {
  public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    int previous_ = -1;
};

// An event is handed out again only after its owner, which outlives every query, has gone.
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

// The first error that persists after its call, such as a fault in a kernel: no result of the
// device is valid after it, and all waiters have to get it.
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
