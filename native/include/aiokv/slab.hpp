// An array of plain values that grows in place: address space is reserved at once, memory is
// taken as it is touched, in huge pages where the kernel gives them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace aiokv {

// The first use of a huge page zeroes 2 MiB, and may wait for the kernel to find one: several ms.
// That is for arrays that are populated in time, or filled from the start.
enum class Pages : std::uint8_t { kHuge, kSmall };

template <class T>
class Slab {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    // The first `populated` elements get their memory now rather than at their first use.
    explicit Slab(std::size_t expected, std::size_t populated = 0, Pages pages = Pages::kHuge)
        : capacity_(std::max<std::size_t>(expected, 1)), pages_(pages) {
        void* data = mmap(nullptr, capacity_ * sizeof(T), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        adopt(data);
#ifdef MADV_POPULATE_WRITE
        (void)madvise(data, std::min(populated, capacity_) * sizeof(T), MADV_POPULATE_WRITE);
#endif
    }
    ~Slab() {
        if (data_ != nullptr) munmap(data_, capacity_ * sizeof(T));
    }
    Slab(Slab&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          capacity_(other.capacity_),
          size_(other.size_),
          pages_(other.pages_) {}
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    T& operator[](std::size_t index) { return data_[index]; }
    const T& operator[](std::size_t index) const { return data_[index]; }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return size_ * sizeof(T); }

    // The new elements are zero bytes. Elements may move.
    void grow(std::size_t count) {
        if (size_ + count > capacity_) reserve(std::max(size_ + count, capacity_ * 2));
        size_ += count;
    }

  private:
    void reserve(std::size_t capacity) {
        void* data = mremap(data_, capacity_ * sizeof(T), capacity * sizeof(T), MREMAP_MAYMOVE);
        if (data == MAP_FAILED) throw std::bad_alloc();
        capacity_ = capacity;
        adopt(data);
    }
    void adopt(void* data) {
        data_ = static_cast<T*>(data);
        if (pages_ == Pages::kSmall) return;
        // Without huge pages the array works as well, only slower.
        (void)madvise(data, capacity_ * sizeof(T), MADV_HUGEPAGE);
    }

    T* data_ = nullptr;
    std::size_t capacity_;
    std::size_t size_ = 0;
    Pages pages_;
};

}  // namespace aiokv
