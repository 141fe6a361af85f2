#include "aiokv/cuda_slots.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "aiokv/cuda_check.hpp"
#include "aiokv/trailer.hpp"

namespace aiokv::cuda {
namespace {

template <typename T>
T* uploaded(const T* values, std::size_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
    const cudaError_t code = cudaMemcpy(memory, values, count * sizeof(T), cudaMemcpyHostToDevice);
    if (code != cudaSuccess) {
        cudaFree(memory);
        check(code, "uploading the layout of slots");
    }
    return static_cast<T*>(memory);
}

template <typename T>
T* zeroed(std::size_t count) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
    const cudaError_t code = cudaMemset(memory, 0, count * sizeof(T));
    if (code != cudaSuccess) {
        cudaFree(memory);
        check(code, "cudaMemset");
    }
    return static_cast<T*>(memory);
}

template <typename T>
void free_device(T*& memory) {
    cudaFree(std::exchange(memory, nullptr));
}

// Most bytes per launch. Work of the model that waits for multiprocessors gets them between two
// launches.
constexpr std::size_t kLaunchBytes = std::size_t{32} << 20;

// Largest gap between a trailer and the next slot that is copied, too: that takes less time than
// one more copy.
constexpr std::size_t kMaxGapBytes = 4096;

bool continues(const PeerCopy& copy, const PeerCopy& next) {
    const std::uintptr_t end = copy.source + copy.num_bytes;
    return next.source >= end && next.source - end < kMaxGapBytes &&
           next.target - copy.target == next.source - copy.source;
}

}  // namespace

SumConstants SumConstants::make() {
    const ChecksumConstants& constants = checksum_constants();
    SumConstants made;
    std::ranges::copy(constants.words, made.words);
    const auto powers = [](mersenne::U128(&out)[kUnitChunks + 1], mersenne::U128 factor) {
        out[0] = 1;
        for (std::size_t i = 1; i <= kUnitChunks; ++i) {
            out[i] = mersenne::multiplied(out[i - 1], factor);
        }
    };
    powers(made.powers, constants.factor);
    powers(made.unit_powers, made.powers[kUnitChunks]);
    return made;
}

// --- memory ----------------------------------------------------------------------------

DeviceMemory::DeviceMemory(int device, std::size_t num_bytes)
    : device_(device), num_bytes_(num_bytes) {
    const DeviceScope scope(device);
    check(cudaMalloc(&memory_, std::max<std::size_t>(num_bytes, 1)), "cudaMalloc for peer slots");
}

DeviceMemory::~DeviceMemory() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: its memory is freed when the process ends.
    }
}

DeviceMemory::Handle DeviceMemory::handle() const {
    return memory_handle(device_, address());
}

DeviceMemory::Handle memory_handle(int device, std::uintptr_t address) {
    const DeviceScope scope(device);
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(address)), "cudaIpcGetMemHandle");
    DeviceMemory::Handle bytes;
    std::memcpy(bytes.data(), &handle, sizeof handle);
    return bytes;
}

void DeviceMemory::close() {
    if (memory_ != nullptr) {
        const DeviceScope scope(device_);
        check(cudaFree(std::exchange(memory_, nullptr)), "cudaFree");
    }
}

MappedMemory::MappedMemory(int device, const DeviceMemory::Handle& handle) : device_(device) {
    const DeviceScope scope(device);
    cudaIpcMemHandle_t raw;
    std::memcpy(&raw, handle.data(), sizeof raw);
    check(cudaIpcOpenMemHandle(&memory_, raw, cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
}

MappedMemory::~MappedMemory() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: the mapping ends with the process.
    }
}

void MappedMemory::close() {
    if (memory_ != nullptr) {
        const DeviceScope scope(device_);
        check(cudaIpcCloseMemHandle(std::exchange(memory_, nullptr)), "cudaIpcCloseMemHandle");
    }
}

// --- work ------------------------------------------------------------------------------

ResultPool::ResultPool(int device, std::size_t num_results)
    : device_(device), num_results_(std::max<std::size_t>(num_results, 1)) {}

ResultPool::~ResultPool() {
    for (const Loan& loan : all_) {
        cudaFreeHost(loan.host);  // at exit the driver may have ended: ignore the error
    }
}

ResultPool::Loan ResultPool::take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
        const DeviceScope scope(device_);
        Loan loan;
        check(cudaHostAlloc(reinterpret_cast<void**>(&loan.host), num_results_ * sizeof *loan.host,
                            cudaHostAllocMapped | cudaHostAllocPortable),
              "cudaHostAlloc for results");
        all_.push_back(loan);
        check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&all_.back().device), loan.host, 0),
              "cudaHostGetDevicePointer");
        return all_.back();
    }
    const Loan loan = free_.back();
    free_.pop_back();
    return loan;
}

void ResultPool::give(Loan loan) {
    const std::lock_guard lock(mutex_);
    free_.push_back(loan);
}

SlotWork::SlotWork(std::shared_ptr<EventPool> events, std::shared_ptr<Health> health,
                   std::shared_ptr<ResultPool> pool, std::size_t num_results)
    : events_(std::move(events)),
      health_(std::move(health)),
      pool_(std::move(pool)),
      num_results_(num_results),
      event_(events_->take()) {
    if (pool_ != nullptr) {
        results_ = pool_->take();
        std::fill_n(results_.host, num_results, static_cast<std::uint32_t>(StoreResult::kWrong));
    }
}

SlotWork::~SlotWork() {
    if (pool_ != nullptr) {
        synchronize();  // the kernels may still write the results
        pool_->give(results_);
    }
    events_->give(event_);  // a stream that waits for it waits for what is recorded now
}

void SlotWork::submitted(cudaStream_t stream) {
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
}

bool SlotWork::done() {
    if (done_.load(std::memory_order_acquire)) {
        return true;
    }
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    if (code != cudaSuccess) {
        cudaGetLastError();
        health_->break_with(static_cast<int>(code), describe(code, "moving blocks of peers"));
    }
    done_.store(true, std::memory_order_release);
    return true;
}

void SlotWork::synchronize() {
    if (!done_.load(std::memory_order_acquire) && cudaEventSynchronize(event_) != cudaSuccess) {
        cudaGetLastError();
    }
    while (!done()) {
    }
}

void SlotWork::stream_wait(cudaStream_t stream) {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

std::optional<Failure> SlotWork::failure() const {
    if (!health_->broken()) {
        return std::nullopt;
    }
    return Failure{0, health_->code(), health_->reason()};
}

std::vector<std::uint8_t> SlotWork::results() {
    std::vector<std::uint8_t> results(num_results_, static_cast<std::uint8_t>(StoreResult::kWrong));
    if (done() && !health_->broken()) {
        std::transform(results_.host, results_.host + num_results_, results.begin(),
                       [](std::uint32_t result) { return static_cast<std::uint8_t>(result); });
    }
    return results;
}

// --- passes ----------------------------------------------------------------------------

SlotEngine::SlotEngine(Layout layout, SlotOptions options, cudaStream_t send, cudaStream_t receive)
    : layout_(std::move(layout)),
      options_(options),
      events_(std::make_shared<EventPool>(options.device, false)),
      health_(std::make_shared<Health>()),
      results_(std::make_shared<ResultPool>(options.device, layout_.host_blocks)),
      ids_(layout_.host_blocks, layout_.device_blocks) {
    layout_.validate();
    const std::size_t payload = layout_.host_bytes();
    if (payload == 0 || payload + kTrailerBytes > layout_.host_pitch) {
        throw LayoutError("slots of " + std::to_string(layout_.host_pitch) +
                          " bytes have no place for " + std::to_string(payload) +
                          " bytes and a trailer");
    }
    if (payload % sizeof(uint4) != 0 || layout_.host_pitch % sizeof(uint4) != 0 ||
        layout_.host_base % sizeof(uint4) != 0) {
        throw LayoutError("slots in device memory are not aligned to 16 bytes");
    }
    if (options_.blocks <= 0) {
        throw ConfigError("blocks is " + std::to_string(options_.blocks) + "; it must be positive");
    }
    units_ = static_cast<std::uint32_t>((payload + kUnitBytes - 1) / kUnitBytes);
    const DeviceScope scope(options_.device);
    try {
        bulk_ = options_.bulk && prepare_bulk_copies();
        make_steps();
        const SumConstants constants = SumConstants::make();
        constants_ = uploaded(&constants, 1);
        device_slices_ = uploaded(layout_.slices.data(), layout_.slices.size());
        allocate(send_, send);
        allocate(receive_, receive);
    } catch (...) {
        close();
        throw;
    }
}

SlotEngine::~SlotEngine() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: its memory is freed when the process ends.
    }
}

// Leaves the steps empty if a piece of a block begins or ends inside a stretch of kChunkBytes.
void SlotEngine::make_steps() {
    for (const Slice& slice : layout_.slices) {
        const bool fits = slice.host_offset % kChunkBytes == 0 && slice.bytes % kChunkBytes == 0 &&
                          slice.host_bytes == slice.bytes &&
                          slice.device_base % sizeof(uint4) == 0 &&
                          slice.device_stride % sizeof(uint4) == 0;
        if (!fits) {
            steps_.clear();
            return;
        }
        for (std::size_t at = 0; at < slice.bytes; at += kChunkBytes) {
            steps_.push_back({slice.device_base + at, slice.device_stride});
        }
    }
    device_steps_ = uploaded(steps_.data(), steps_.size());
}

void SlotEngine::allocate(Lane& lane, cudaStream_t stream) {
    lane.stream = stream;
    lane.sums = zeroed<mersenne::U128>(std::size_t{kPassRows} * units_);
    lane.arrived = zeroed<std::uint32_t>(kPassRows);
}

void SlotEngine::check_pairs(Ids slots, Ids device_ids) {
    if (slots.size() != device_ids.size()) {
        throw UsageError(std::to_string(slots.size()) + " slots for " +
                         std::to_string(device_ids.size()) + " device blocks");
    }
}

void SlotEngine::check_keys(Ids slots, Keys keys) {
    if (keys.size() != slots.size() * sizeof(PassRow::key)) {
        throw UsageError("keys has " + std::to_string(keys.size()) + " bytes; " +
                         std::to_string(slots.size()) + " slots have " +
                         std::to_string(slots.size() * sizeof(PassRow::key)) + " bytes of keys");
    }
}

SlotEngine::Work SlotEngine::gather(Ids device_ids, Ids slots, Keys keys, cudaEvent_t after) {
    check_keys(slots, keys);
    check_pairs(slots, device_ids);
    const std::lock_guard lock(mutex_);
    ids_.check_offload(slots, device_ids);
    return run(send_, Way::kGather, {slots, device_ids, keys}, false, after);
}

SlotEngine::Work SlotEngine::verify(Ids slots, Keys keys) {
    check_keys(slots, keys);
    const std::lock_guard lock(mutex_);
    ids_.check_offload(slots, {});  // no slot twice, because each has one result
    return run(receive_, Way::kRead, {slots, {}, keys}, true, nullptr);
}

SlotEngine::Work SlotEngine::scatter_verified(Ids slots, Ids device_ids, Keys keys,
                                              cudaEvent_t after) {
    check_keys(slots, keys);
    check_pairs(slots, device_ids);
    const std::lock_guard lock(mutex_);
    ids_.check_onload(slots, device_ids);
    ids_.check_offload(slots, device_ids);
    return run(receive_, Way::kScatter, {slots, device_ids, keys}, true, after);
}

SlotEngine::Work SlotEngine::run(Lane& lane, Way way, const Rows& rows, bool verifies,
                                 cudaEvent_t after) {
    health_->raise_if_broken();
    if (closed_) {
        throw UsageError("the device is closed");
    }
    const DeviceScope scope(options_.device);
    const std::size_t num_results = verifies ? rows.slots.size() : 0;
    auto work =
        std::make_shared<SlotWork>(events_, health_, verifies ? results_ : nullptr, num_results);
    if (after != nullptr) {
        check(cudaStreamWaitEvent(lane.stream, after, 0), "cudaStreamWaitEvent");
    }
    const std::size_t most =
        std::clamp<std::size_t>(kLaunchBytes / layout_.host_bytes(), 1, kPassRows);
    for (std::size_t row = 0; row < rows.slots.size(); row += most) {
        const std::size_t count = std::min(most, rows.slots.size() - row);
        SlotPass pass{.slots = reinterpret_cast<std::uint8_t*>(layout_.host_base),
                      .pitch = layout_.host_pitch,
                      .payload_bytes = layout_.host_bytes(),
                      .steps = device_steps_,
                      .constants = constants_,
                      .sums = lane.sums,
                      .arrived = lane.arrived,
                      .results = verifies ? work->results_on_device() + row : nullptr,
                      .units = units_,
                      .num_rows = static_cast<std::uint32_t>(count),
                      .rows = {}};
        for (std::size_t i = 0; i < count; ++i) {
            PassRow& target = pass.rows[i];
            target.slot = rows.slots[row + i];
            target.device_id = rows.device_ids.empty() ? 0 : rows.device_ids[row + i];
            std::memcpy(target.key, &rows.keys[(row + i) * sizeof target.key], sizeof target.key);
        }
        submit(lane, pass, way);
    }
    work->submitted(lane.stream);
    return work;
}

void SlotEngine::submit(Lane& lane, const SlotPass& pass, Way way) {
    if (way == Way::kRead || fused()) {
        launch_slot_pass(pass, way, options_.blocks, bulk_, lane.stream);
        return;
    }
    std::size_t largest = 0;
    for (const Slice& slice : layout_.slices) {
        largest = std::max(largest, slice.bytes);
    }
    const KernelCopy copy{device_slices_,
                          static_cast<std::uint32_t>(layout_.slices.size()),
                          static_cast<std::uint32_t>((largest + kChunkBytes - 1) / kChunkBytes),
                          nullptr,
                          pass.num_rows,
                          {}};
    launch_slot_copy(pass, copy, way, options_.blocks, lane.stream);
    launch_slot_pass(pass, Way::kRead, options_.blocks, bulk_, lane.stream);
}

void SlotEngine::close() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) {
        return;
    }
    const DeviceScope scope(options_.device);
    for (Lane* lane : {&send_, &receive_}) {
        if (lane->stream != nullptr) {
            cudaStreamSynchronize(lane->stream);  // an error here has reached its work already
        }
        free_device(lane->sums);
        free_device(lane->arrived);
    }
    free_device(device_steps_);
    free_device(device_slices_);
    free_device(constants_);
    cudaGetLastError();
}

// --- copies ----------------------------------------------------------------------------

PeerCopies::PeerCopies(int device)
    : device_(device),
      events_(std::make_shared<EventPool>(device, false)),
      health_(std::make_shared<Health>()) {
    const DeviceScope scope(device);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

PeerCopies::~PeerCopies() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: the stream ends with the process.
    }
}

void PeerCopies::close() {
    const std::lock_guard lock(mutex_);
    if (stream_ != nullptr) {
        const DeviceScope scope(device_);
        const cudaStream_t stream = std::exchange(stream_, nullptr);
        const cudaError_t code = cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
        check(code, "copying to the memory of a peer");
    }
}

std::shared_ptr<SlotWork> PeerCopies::copy(std::span<const PeerCopy> copies, SlotWork* after) {
    health_->raise_if_broken();
    const std::lock_guard lock(mutex_);
    if (stream_ == nullptr) {
        throw UsageError("the copies to peers are closed");
    }
    const DeviceScope scope(device_);
    auto work = std::make_shared<SlotWork>(events_, health_);
    if (after != nullptr) {
        after->stream_wait(stream_);
    }
    for (std::size_t i = 0; i < copies.size();) {
        PeerCopy merged = copies[i++];
        while (i < copies.size() && continues(merged, copies[i])) {
            const PeerCopy& next = copies[i++];
            merged.num_bytes = next.source + next.num_bytes - merged.source;
        }
        check(cudaMemcpyAsync(reinterpret_cast<void*>(merged.target),
                              reinterpret_cast<const void*>(merged.source), merged.num_bytes,
                              cudaMemcpyDeviceToDevice, stream_),
              "copying to the memory of a peer");
    }
    work->submitted(stream_);
    return work;
}

}  // namespace aiokv::cuda
