#include <algorithm>
#include <limits>
#include <string>

#include "aiokv/cuda_layout.hpp"
#include "aiokv/error.hpp"

namespace aiokv::cuda {

Window Layout::window(std::uint32_t first_layer, std::uint32_t end_layer) const {
    auto offset_of = [this](std::uint32_t layer) {
        const std::uint32_t slice = layer_begin[layer];
        return slice == slices.size() ? host_bytes() : slices[slice].host_offset;
    };
    const std::size_t begin = offset_of(first_layer);
    return {begin, offset_of(end_layer) - begin};
}

std::size_t Layout::host_bytes() const {
    return slices.empty() ? 0 : slices.back().host_offset + slices.back().host_bytes;
}

std::size_t Layout::max_layer_bytes() const {
    std::size_t most = 0;
    for (std::uint32_t layer = 0; layer < num_layers(); ++layer) {
        most = std::max(most, window(layer, layer + 1).bytes);
    }
    return most;
}

void Layout::validate() const {
    constexpr auto kMaxBlocks =
        static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max());
    if (layer_begin.empty() || layer_begin.front() != 0 || layer_begin.back() != slices.size() ||
        !std::is_sorted(layer_begin.begin(), layer_begin.end())) {
        throw LayoutError("layer_begin does not cover the slices");
    }
    if (device_blocks > kMaxBlocks || host_blocks > kMaxBlocks) {
        throw LayoutError("block ids are int32");
    }
    std::size_t end = 0;
    for (const Slice& slice : slices) {
        if (slice.host_offset != end || slice.bytes == 0 || slice.host_bytes < slice.bytes) {
            throw LayoutError("the slices do not tile a host block: expected one at offset " +
                              std::to_string(end) + ", got " + std::to_string(slice.host_offset));
        }
        if (slice.device_stride < slice.bytes || slice.device_base == 0) {
            throw LayoutError("device blocks of " + std::to_string(slice.bytes) + " bytes lie " +
                              std::to_string(slice.device_stride) + " bytes apart");
        }
        end += slice.host_bytes;
    }
    if (end > host_pitch) {
        throw LayoutError("host blocks lie " + std::to_string(host_pitch) +
                          " bytes apart, but their slices have " + std::to_string(end) + " bytes");
    }
}

IdCheck::IdCheck(std::uint32_t host_blocks, std::uint32_t device_blocks)
    : host_{"host", std::vector<std::uint32_t>(host_blocks)},
      device_{"device", std::vector<std::uint32_t>(device_blocks)} {}

void IdCheck::check_onload(std::span<const std::int32_t> host,
                           std::span<const std::int32_t> device) {
    in_range(host_, host);
    in_range(device_, device);
    distinct(device_, device);
}

void IdCheck::check_offload(std::span<const std::int32_t> host,
                            std::span<const std::int32_t> device) {
    in_range(host_, host);
    in_range(device_, device);
    distinct(host_, host);
}

void IdCheck::in_range(const Pool& pool, std::span<const std::int32_t> ids) {
    for (const std::int32_t id : ids) {
        if (id < 0 || static_cast<std::size_t>(id) >= pool.stamps.size()) {
            throw UsageError(std::string(pool.name) + " block " + std::to_string(id) +
                             " is not in [0, " + std::to_string(pool.stamps.size()) + ")");
        }
    }
}

void IdCheck::distinct(Pool& pool, std::span<const std::int32_t> ids) {
    if (++pool.round == 0) {  // wrapped: old stamps would look new
        std::fill(pool.stamps.begin(), pool.stamps.end(), 0);
        pool.round = 1;
    }
    for (const std::int32_t id : ids) {
        std::uint32_t& stamp = pool.stamps[static_cast<std::size_t>(id)];
        if (stamp == pool.round) {
            throw UsageError("duplicate destination: " + std::string(pool.name) + " block " +
                             std::to_string(id));
        }
        stamp = pool.round;
    }
}

void append_host_copies(const Layout& layout, std::size_t chunk_bytes,
                        std::span<const std::int32_t> ids, Window window,
                        std::vector<HostCopy>& out) {
    const std::size_t pitch = layout.host_pitch;
    std::size_t row = 0;
    while (row < ids.size()) {
        std::size_t run = 1;
        while (row + run < ids.size() &&
               ids[row + run] == ids[row] + static_cast<std::int32_t>(run)) {
            ++run;
        }
        for (const std::size_t end = row + run; row < end;) {
            const std::size_t start =
                static_cast<std::size_t>(ids[row]) * pitch + window.offset;  // from host_base
            const std::size_t boundary = (start / chunk_bytes + 1) * chunk_bytes;
            const std::uintptr_t host = layout.host_base + start;
            const std::size_t staging = row * window.bytes;
            if (start + window.bytes <= boundary) {
                const std::size_t fit =
                    std::min(end - row, (boundary - start - window.bytes) / pitch + 1);
                out.push_back({host, staging, window.bytes, pitch, fit});
                row += fit;
                continue;
            }
            for (std::size_t done = 0, at = start; done < window.bytes;) {
                const std::size_t next = (at / chunk_bytes + 1) * chunk_bytes;
                const std::size_t part = std::min(window.bytes - done, next - at);
                out.push_back({host + done, staging + done, part, part, 1});
                done += part;
                at += part;
            }
            ++row;
        }
    }
}

}  // namespace aiokv::cuda
