// The baselines of the disk bench: the simplest io_uring loop, and threads with blocking calls.
// Built by bench/disk_io.py into a shared library; not part of the package.
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Blocks of one file and of one buffer, in the same order.
struct Blocks {
    int fd;
    int writes;
    std::uint32_t block_bytes;
    std::uint32_t count;
    const std::uint64_t* addresses;
    const std::uint64_t* offsets;
};

template <class T>
T* at(void* base, unsigned offset) {
    return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

struct Ring {
    int fd = -1;
    unsigned depth = 0;
    io_uring_params params{};
    void* rings = nullptr;
    io_uring_sqe* sqes = nullptr;
};

long enter(const Ring& ring, unsigned submit, unsigned wait) {
    return syscall(__NR_io_uring_enter, ring.fd, submit, wait, IORING_ENTER_GETEVENTS, nullptr, 0);
}

}  // namespace

extern "C" {

// A ring whose only registered buffer is `base`, of at most 1 GiB. nullptr: errno says why.
void* ring_open(unsigned depth, void* base, std::size_t num_bytes) {
    auto* ring = new Ring;
    ring->depth = depth;
    ring->fd = static_cast<int>(syscall(__NR_io_uring_setup, depth, &ring->params));
    const iovec buffer{base, num_bytes};
    if (ring->fd < 0 ||
        syscall(__NR_io_uring_register, ring->fd, IORING_REGISTER_BUFFERS, &buffer, 1) < 0) {
        const int error = errno;
        if (ring->fd >= 0) close(ring->fd);
        delete ring;
        errno = error;
        return nullptr;
    }
    const io_uring_params& p = ring->params;
    ring->rings = mmap(nullptr, p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe),
                       PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
    ring->sqes = static_cast<io_uring_sqe*>(mmap(nullptr, p.sq_entries * sizeof(io_uring_sqe),
                                                 PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd,
                                                 IORING_OFF_SQES));
    return ring;
}

void ring_close(void* opened) {
    auto* ring = static_cast<Ring*>(opened);
    const io_uring_params& p = ring->params;
    munmap(ring->rings, p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe));
    munmap(ring->sqes, p.sq_entries * sizeof(io_uring_sqe));
    close(ring->fd);
    delete ring;
}

// Moves all blocks, `depth` at a time. Returns 0, or the errno of the first failure (EIO: short).
int ring_run(void* opened, const Blocks* blocks) {
    const auto& ring = *static_cast<Ring*>(opened);
    const io_uring_params& p = ring.params;
    auto* sq_tail = at<unsigned>(ring.rings, p.sq_off.tail);
    auto* array = at<unsigned>(ring.rings, p.sq_off.array);
    auto* cq_head = at<unsigned>(ring.rings, p.cq_off.head);
    auto* cq_tail = at<unsigned>(ring.rings, p.cq_off.tail);
    auto* cqes = at<io_uring_cqe>(ring.rings, p.cq_off.cqes);
    std::uint32_t begun = 0, ended = 0;
    while (ended < blocks->count) {
        unsigned prepared = 0;
        for (; begun < blocks->count && begun - ended < ring.depth; ++begun, ++prepared) {
            const unsigned slot = (*sq_tail + prepared) & (p.sq_entries - 1);
            io_uring_sqe& entry = ring.sqes[slot];
            std::memset(&entry, 0, sizeof entry);
            entry.opcode = blocks->writes ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
            entry.fd = blocks->fd;
            entry.addr = blocks->addresses[begun];
            entry.len = blocks->block_bytes;
            entry.off = blocks->offsets[begun];
            array[slot] = slot;
        }
        __atomic_store_n(sq_tail, *sq_tail + prepared, __ATOMIC_RELEASE);
        if (enter(ring, prepared, 1) < 0 && errno != EINTR) return errno;
        unsigned head = *cq_head;
        for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); ++head, ++ended) {
            const int result = cqes[head & (p.cq_entries - 1)].res;
            if (result < 0) return -result;
            if (static_cast<std::uint32_t>(result) != blocks->block_bytes) return EIO;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
    return 0;
}

// Moves all blocks with that many threads and preadv or pwritev. Returns as ring_run() does.
int threads_run(unsigned num_threads, const Blocks* blocks) {
    std::atomic<std::uint32_t> next{0};
    std::atomic<int> error{0};
    const auto work = [&] {
        for (std::uint32_t i = next++; i < blocks->count; i = next++) {
            const iovec part{reinterpret_cast<void*>(blocks->addresses[i]), blocks->block_bytes};
            const auto offset = static_cast<off_t>(blocks->offsets[i]);
            const ssize_t moved = blocks->writes ? pwritev(blocks->fd, &part, 1, offset)
                                                 : preadv(blocks->fd, &part, 1, offset);
            if (moved < 0) {
                error = errno;
            } else if (static_cast<std::uint32_t>(moved) != blocks->block_bytes) {
                error = EIO;
            }
        }
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < num_threads; ++i) threads.emplace_back(work);
    for (auto& thread : threads) thread.join();
    return error;
}

}  // extern "C"
