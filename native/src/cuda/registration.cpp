#include "aiokv/cuda_registration.hpp"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_events.hpp"

namespace aiokv::cuda {
namespace {

constexpr std::size_t kTouchBytes = std::size_t{4} << 20;
constexpr std::size_t kPageBytes = 4096;
constexpr int kPolicyPreferred = 1;  // in linux/mempolicy.h, which some machines lack
constexpr int kPolicyBind = 2;

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

std::string memlock_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return "unlimited";
    }
    return std::to_string(limit.rlim_cur) + " bytes";
}

std::size_t end_of(std::size_t index, std::size_t size, std::size_t total) {
    return std::min((index + 1) * size, total);
}

}  // namespace

HostRegistration::HostRegistration(std::uintptr_t base, std::size_t bytes,
                                   RegistrationOptions options)
    : base_(reinterpret_cast<std::uint8_t*>(base)),
      bytes_(bytes),
      options_(options),
      num_chunks_((bytes + options.chunk_bytes - 1) /
                  std::max<std::size_t>(options.chunk_bytes, 1)),
      started_seconds_(now_seconds()),
      touched_(num_chunks_) {
    if (base % kPageBytes != 0 || options_.chunk_bytes == 0 ||
        options_.chunk_bytes % kTouchBytes != 0) {
        throw UsageError(
            "host memory is registered from a page boundary, in chunks of a multiple of " +
            std::to_string(kTouchBytes) + " bytes");
    }
    thread_ = std::thread([this] { run(); });
}

HostRegistration::~HostRegistration() {
    close();
}

bool HostRegistration::finished() const {
    std::lock_guard lock(mutex_);
    return finished_;
}

double HostRegistration::elapsed_seconds() const {
    const double ended = ended_seconds_.load();
    return (ended > 0.0 ? ended : now_seconds()) - started_seconds_;
}

void HostRegistration::wait_ready(std::size_t bytes) {
    if (ready_bytes() >= bytes) {
        return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ || ready_.load() >= bytes; });
    if (ready_.load() < bytes) {
        throw DeviceError(failure_.empty() ? "the host arena stopped growing at " +
                                                 std::to_string(ready_.load()) + " of " +
                                                 std::to_string(bytes_) + " bytes"
                                           : failure_,
                          failure_code_);
    }
}

void HostRegistration::cancel() {
    std::lock_guard lock(mutex_);
    cancelled_.store(true);
    changed_.notify_all();
}

void HostRegistration::close() {
    cancel();
    if (thread_.joinable()) {
        thread_.join();
    }
    if (ready_.load() == 0) {
        return;
    }
    const DeviceScope scope(options_.device);
    for (std::size_t begin = 0; begin < ready_.load(); begin += options_.chunk_bytes) {
        if (cudaHostUnregister(base_ + begin) != cudaSuccess) {
            cudaGetLastError();  // the context is broken: the process must be restarted
        }
    }
    ready_.store(0);
}

// Sets the placement policy before the first touch of a page, which decides its placement.
void HostRegistration::bind() {
    if (options_.numa_node < 0 || options_.numa_node >= 64 || bytes_ == 0) {
        return;
    }
    const unsigned long mask = 1ul << options_.numa_node;
    const int policy = options_.numa_strict ? kPolicyBind : kPolicyPreferred;
    const std::size_t length = (bytes_ + kPageBytes - 1) / kPageBytes * kPageBytes;
    syscall(SYS_mbind, base_, length, policy, &mask, 65ul, 0ul);  // a refusal costs only speed
}

void HostRegistration::run() {
    pthread_setname_np(pthread_self(), "aiokv-pin");  // the touching threads inherit the name
    bind();
    std::vector<std::thread> touchers;
    for (unsigned i = 0; i < std::max(options_.touch_threads, 1u); ++i) {
        touchers.emplace_back([this] { touch(); });
    }
    try {
        check(cudaSetDevice(options_.device), "cudaSetDevice");
        register_chunks();
        stop("", 0);
    } catch (const DeviceError& error) {
        stop(error.what(), error.code);
    }
    cancel();
    for (std::thread& toucher : touchers) {
        toucher.join();
    }
}

void HostRegistration::stop(const std::string& reason, int code) {
    {
        std::lock_guard lock(mutex_);
        failure_ = reason;
        failure_code_ = code;
        finished_ = true;
        ended_seconds_.store(now_seconds());
    }
    changed_.notify_all();
}

void HostRegistration::touch() {
    const std::size_t pieces = (bytes_ + kTouchBytes - 1) / kTouchBytes;
    while (!cancelled_.load(std::memory_order_relaxed)) {
        const std::size_t piece = next_touch_.fetch_add(1);
        if (piece >= pieces) {
            return;
        }
        for (std::size_t at = piece * kTouchBytes; at < end_of(piece, kTouchBytes, bytes_);
             at += kPageBytes) {
            __atomic_fetch_or(base_ + at, std::uint8_t{0}, __ATOMIC_RELAXED);
        }
        touched_[piece * kTouchBytes / options_.chunk_bytes].fetch_add(1);
        std::lock_guard lock(mutex_);  // else the registering thread could miss it
        changed_.notify_all();
    }
}

void HostRegistration::register_chunks() {
    for (std::size_t chunk = 0; chunk < num_chunks_; ++chunk) {
        const std::size_t begin = chunk * options_.chunk_bytes;
        const std::size_t size = end_of(chunk, options_.chunk_bytes, bytes_) - begin;
        const auto pieces = static_cast<std::uint32_t>((size + kTouchBytes - 1) / kTouchBytes);
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock,
                          [&] { return cancelled_.load() || touched_[chunk].load() >= pieces; });
        }
        if (cancelled_.load()) {
            return;
        }
        const cudaError_t code = cudaHostRegister(
            base_ + begin, size, cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (code != cudaSuccess) {
            cudaGetLastError();
            throw DeviceError(describe(code, "cudaHostRegister") + ": registered " +
                                  std::to_string(begin) + " of " + std::to_string(bytes_) +
                                  " bytes, the memlock limit is " + memlock_limit() +
                                  "; lower host_blocks or raise the limit",
                              static_cast<int>(code));
        }
        {
            std::lock_guard lock(mutex_);
            ready_.store(begin + size, std::memory_order_release);
        }
        changed_.notify_all();
    }
}

}  // namespace aiokv::cuda
