#include "aiokv/cuda_engine.hpp"

#include <algorithm>
#include <utility>

#include "aiokv/cuda_check.hpp"

namespace aiokv::cuda {
namespace {

void validate_streams(const LaneStreams& streams) {
    for (cudaStream_t stream : {streams.copy, streams.kernel}) {
        if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
            throw UsageError("the stream is a default stream; transfers need their own streams");
        }
    }
}

// The kernels find the slices of a window by layer, so the slices are uploaded once.
Slice* upload_slices(const Layout& layout, cudaStream_t stream) {
    if (layout.slices.empty()) {
        return nullptr;
    }
    const std::size_t bytes = layout.slices.size() * sizeof(Slice);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    check(cudaMemcpyAsync(memory, layout.slices.data(), bytes, cudaMemcpyHostToDevice, stream),
          "uploading the layout");
    check(cudaStreamSynchronize(stream), "uploading the layout");
    return static_cast<Slice*>(memory);
}

}  // namespace

SwapEngine::SwapEngine(Layout layout, EngineOptions options, LaneStreams onload,
                       LaneStreams offload, HostRegistration& host)
    : layout_(std::move(layout)),
      options_(options),
      host_(host),
      events_(std::make_shared<EventPool>(options.device, options.timing)),
      health_(std::make_shared<Health>()),
      ids_(layout_.host_blocks, layout_.device_blocks) {
    layout_.validate();
    validate_streams(onload);
    validate_streams(offload);
    if (host.total_bytes() < layout_.host_pitch * layout_.host_blocks) {
        throw LayoutError("the host arena has " + std::to_string(host.total_bytes()) +
                          " bytes, the host pool needs " +
                          std::to_string(layout_.host_pitch * layout_.host_blocks));
    }
    if (options_.num_slots == 0 || options_.queued_pieces == 0 || options_.staged_blocks <= 0 ||
        options_.direct_blocks <= 0) {
        throw ConfigError(
            "num_slots, queued_pieces, staged_blocks and direct_blocks must be positive");
    }
    const DeviceScope scope(options_.device);
    device_slices_ = upload_slices(layout_, onload.kernel);
    const LaneContext context{layout_, options_, device_slices_, host_, events_, health_};
    onload_ = std::make_unique<Lane>(Direction::kOnload, context, onload);
    offload_ = std::make_unique<Lane>(Direction::kOffload, context, offload);
}

SwapEngine::~SwapEngine() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: all waiters have failed, and nothing is left to free.
    }
}

std::shared_ptr<Transfer> SwapEngine::submit(Direction direction,
                                             std::span<const std::int32_t> host_ids,
                                             std::span<const std::int32_t> device_ids,
                                             cudaEvent_t after, Path path) {
    health_->raise_if_broken();
    if (closed_) {
        throw UsageError("the device is closed");
    }
    if (host_ids.size() != device_ids.size()) {
        throw UsageError(std::to_string(host_ids.size()) + " host blocks for " +
                         std::to_string(device_ids.size()) + " device blocks");
    }
    if (direction == Direction::kOnload) {
        ids_.check_onload(host_ids, device_ids);
    } else {
        ids_.check_offload(host_ids, device_ids);
        if (path == Path::kDirect) {
            throw UsageError(
                "the direct path supports onloads only: stores across the link stall the GPU");
        }
    }
    Request request{direction,
                    {host_ids.begin(), host_ids.end()},
                    {device_ids.begin(), device_ids.end()},
                    after,
                    path};
    auto transfer =
        std::make_shared<Transfer>(std::move(request), layout_.num_layers(), events_, health_);
    lane(direction).submit(transfer);
    return transfer;
}

void SwapEngine::close() {
    if (closed_) {
        return;
    }
    closed_ = true;
    onload_->close();
    offload_->close();
    const DeviceScope scope(options_.device);
    if (device_slices_ != nullptr) {
        check(cudaFree(std::exchange(device_slices_, nullptr)), "cudaFree");
    }
}

Lane& SwapEngine::lane(Direction direction) {
    return direction == Direction::kOnload ? *onload_ : *offload_;
}

std::vector<Group> SwapEngine::groups(Direction direction) const {
    const std::size_t slot_bytes = std::max(options_.slot_bytes, layout_.max_layer_bytes());
    return direction == Direction::kOnload
               ? plan_onload(layout_, {0, 0}, slot_bytes, options_.planner, Path::kAuto)
               : plan_offload(layout_, slot_bytes);
}

double SwapEngine::cpu_seconds() const {
    return onload_->cpu_seconds() + offload_->cpu_seconds();
}

}  // namespace aiokv::cuda
