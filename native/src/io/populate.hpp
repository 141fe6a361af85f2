// Allocates the pages of a buffer that is about to be registered.
#pragma once

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stop_token>

namespace aiokv {

// Returns false when the kernel refuses to register that much memory.
inline bool may_lock(std::size_t num_bytes) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || num_bytes <= limit.rlim_cur) return true;
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> data{};
    if (::syscall(SYS_capget, &header, data.data()) != 0) return false;
    return (data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective & CAP_TO_MASK(CAP_IPC_LOCK)) != 0;
}

// Lets the kernel allocate the pages of a buffer, one huge page per call, until `stop`. A
// registration also allocates missing pages, but locks the address space meanwhile: other threads
// then wait in mmap and munmap.
inline void populate(std::uint64_t address, std::size_t num_bytes, const std::stop_token& stop) {
    constexpr std::size_t kStepBytes = std::size_t{2} << 20;
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, of Linux 5.14
    for (std::size_t begin = 0; begin < num_bytes && !stop.stop_requested(); begin += kStepBytes) {
        void* pages = reinterpret_cast<void*>(address + begin);
        // With an old kernel, or memory of a driver, the registration allocates the pages or
        // refuses.
        if (::madvise(pages, std::min(kStepBytes, num_bytes - begin), kPopulateWrite) != 0) return;
    }
}

}  // namespace aiokv
