// An array of plain values that grows in place: address space is reserved at once, memory is
// taken as it is touched, in huge pages where the kernel gives them.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stop_token>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

namespace aiokv {

// The first use of a huge page zeroes 2 MiB and may wait several ms for the kernel to find one. So
// kHuge is for arrays that are populated before their use or filled from the start.
enum class Pages : std::uint8_t { kHuge, kSmall };

template <class T>
class Slab {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    // Allocates the memory of the first `populated` elements now rather than at their first use. In
    // a large array, a thread allocates most of it ahead of the use.
    explicit Slab(std::size_t expected, std::size_t populated = 0, Pages pages = Pages::kHuge)
        : capacity_(std::max<std::size_t>(expected, 1)), pages_(pages) {
        void* data = mmap(nullptr, capacity_ * sizeof(T), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        adopt(data);
        const std::size_t bytes = std::min(populated, capacity_) * sizeof(T);
        populate(data, std::min(bytes, kPopulatedAtOnce));
        if (bytes > kPopulatedAtOnce) populate_later(bytes);
    }
    ~Slab() {
        populating_ = {};
        if (data_ != nullptr) munmap(data_, capacity_ * sizeof(T));
    }
    Slab(Slab&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          capacity_(other.capacity_),
          size_(other.size_),
          pages_(other.pages_),
          populating_(std::move(other.populating_)) {}
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;

    T& operator[](std::size_t index) { return data_[index]; }
    const T& operator[](std::size_t index) const { return data_[index]; }
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return size_ * sizeof(T); }

    // Removes all elements. Those by which the array grows then have any bytes. Keeps the memory.
    void clear() { size_ = 0; }
    // Grows the array by elements of zero bytes, unless it was cleared. Elements may move.
    void grow(std::size_t count) {
        if (size_ + count > capacity_) reserve(std::max(size_ + count, capacity_ * 2));
        size_ += count;
    }

  private:
    static constexpr std::size_t kPopulatedAtOnce = std::size_t{1} << 24;
    static constexpr std::size_t kPageBytes = 4096;
    static constexpr int kPopulatingNice = 10;

    static void populate([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
        (void)madvise(data, bytes, MADV_POPULATE_WRITE);
#endif
    }
    // Allocates a page of memory that another thread may be using, and leaves its bytes as they
    // are. The kernel takes the lock of this mapping. For madvise(), it would take the lock of the
    // address space, and the whole process would wait while this thread has no CPU.
    static void touch(T* data, std::size_t at) {
        char zero = 0;
        std::atomic_ref<char> byte(reinterpret_cast<char*>(data)[at]);
        byte.compare_exchange_strong(zero, 0, std::memory_order_relaxed);
    }
    // Where no thread can be started, the rest gets its memory at its first use. The thread yields
    // to those that work: on few cores, they would wait for it.
    void populate_later(std::size_t bytes) {
        try {
            populating_ = std::jthread([data = data_, bytes](const std::stop_token& stop) {
                (void)setpriority(PRIO_PROCESS, 0, kPopulatingNice);  // Linux: of this thread
                for (std::size_t at = kPopulatedAtOnce; at < bytes && !stop.stop_requested();
                     at += kPageBytes) {
                    touch(data, at);
                }
            });
        } catch (const std::system_error&) {
        }
    }
    void reserve(std::size_t capacity) {
        populating_ = {};  // the array may move
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
    std::jthread populating_;  // last member: the thread ends before the memory is freed
};

}  // namespace aiokv
