#include "aiokv/cuda_events.hpp"

#include "aiokv/cuda_check.hpp"

namespace aiokv::cuda {

DeviceScope::DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) {
        previous_ = -1;
    } else {
        check(cudaSetDevice(device), "cudaSetDevice");
    }
}

DeviceScope::~DeviceScope() {
    if (previous_ >= 0) {
        cudaSetDevice(previous_);
    }
}

EventPool::EventPool(int device, bool timing) : device_(device), timing_(timing) {}

EventPool::~EventPool() {
    for (cudaEvent_t event : free_) {
        cudaEventDestroy(event);  // at exit the driver may have ended: ignore the error
    }
}

cudaEvent_t EventPool::take() {
    {
        std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            cudaEvent_t event = free_.back();
            free_.pop_back();
            return event;
        }
    }
    DeviceScope scope(device_);
    cudaEvent_t event = nullptr;
    const unsigned flags = cudaEventBlockingSync | (timing_ ? 0u : cudaEventDisableTiming);
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    return event;
}

void EventPool::give(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
}

std::string Health::reason() const {
    std::lock_guard lock(mutex_);
    return reason_;
}

void Health::break_with(int code, const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (code_.load(std::memory_order_relaxed) == 0) {
        reason_ = reason;
        code_.store(code, std::memory_order_release);
    }
}

void Health::raise_if_broken() const {
    if (broken()) {
        throw DeviceError("the device is broken: " + reason(), code());
    }
}

}  // namespace aiokv::cuda
