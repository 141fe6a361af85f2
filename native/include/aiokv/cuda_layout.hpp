// Where the bytes of a block are on both sides, and how rows of host blocks become copies. Uses no
// CUDA, so it is built and tested everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace aiokv::cuda {

// One region in one layer. Host pieces are padded so that each one begins aligned.
struct Slice {
    std::uintptr_t device_base;  // address of device block 0
    std::size_t device_stride;   // bytes from one device block to the next
    std::size_t bytes;           // per block
    std::size_t host_offset;     // in a host block
    std::size_t host_bytes;      // bytes and padding
};

// Host bytes of a range of layers inside one host block.
struct Window {
    std::size_t offset;
    std::size_t bytes;
};

struct Layout {
    std::uint32_t device_blocks = 0;
    std::uint32_t host_blocks = 0;
    std::uintptr_t host_base = 0;
    std::size_t host_pitch = 0;              // bytes from one host block to the next
    std::vector<Slice> slices;               // in host order
    std::vector<std::uint32_t> layer_begin;  // [num_layers + 1] into slices

    std::uint32_t num_layers() const { return static_cast<std::uint32_t>(layer_begin.size() - 1); }
    std::size_t host_bytes() const;  // copied bytes per block; the rest of the pitch is not copied
    Window window(std::uint32_t first_layer, std::uint32_t end_layer) const;
    std::size_t max_layer_bytes() const;
    // Throws LayoutError unless the slices fill the first part of a host block in order and fit
    // their strides.
    void validate() const;
};

// Throws UsageError if an id is out of range or a destination is listed twice. `stamps` has one
// entry per destination block and is kept between calls, so that a check allocates nothing.
class IdCheck {
  public:
    IdCheck(std::uint32_t host_blocks, std::uint32_t device_blocks);
    void check_onload(std::span<const std::int32_t> host, std::span<const std::int32_t> device);
    void check_offload(std::span<const std::int32_t> host, std::span<const std::int32_t> device);

  private:
    struct Pool {
        const char* name;
        std::vector<std::uint32_t> stamps;
        std::uint32_t round = 0;
    };
    static void in_range(const Pool& pool, std::span<const std::int32_t> ids);
    static void distinct(Pool& pool, std::span<const std::int32_t> ids);
    Pool host_;
    Pool device_;
};

// `rows` lines of `bytes`, `host_pitch` apart on the host and dense in staging memory.
struct HostCopy {
    std::uintptr_t host;
    std::size_t staging_offset;
    std::size_t bytes;
    std::size_t host_pitch;
    std::size_t rows;
};

// Divides rows of consecutive host blocks into copies that do not cross a registration boundary,
// because CUDA refuses such copies. A row across a boundary becomes two copies.
void append_host_copies(const Layout& layout, std::size_t chunk_bytes,
                        std::span<const std::int32_t> sorted_host_ids, Window window,
                        std::vector<HostCopy>& out);

}  // namespace aiokv::cuda
