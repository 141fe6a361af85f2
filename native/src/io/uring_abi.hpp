// The part of the kernel's io_uring ABI that aiokv uses. <linux/io_uring.h> of an old distribution
// lacks some of it, or is absent; test_io.cpp compares both where the header exists.
#pragma once

#include <sys/syscall.h>

#include <cstdint>

namespace aiokv::uring {

inline constexpr long kSysSetup = 425;
inline constexpr long kSysEnter = 426;
inline constexpr long kSysRegister = 427;

struct Sqe {
    std::uint8_t opcode;
    std::uint8_t flags;
    std::uint16_t ioprio;
    std::int32_t fd;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t length;
    std::uint32_t op_flags;
    std::uint64_t user_data;
    std::uint16_t buffer_index;
    std::uint16_t personality;
    std::int32_t file_index;
    std::uint64_t padding[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    std::uint64_t user_address;
};

struct CqOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
    std::uint64_t user_address;
};

struct Params {
    std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    std::uint32_t reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Timespec {
    std::int64_t seconds, nanoseconds;
};

// Last argument of io_uring_enter with kEnterExtArg.
struct EnterArgument {
    std::uint64_t signal_mask;
    std::uint32_t signal_mask_bytes, min_wait_us;
    std::uint64_t timespec;
};
static_assert(sizeof(EnterArgument) == 24);

// Argument of kUpdateBuffers: new values of `count` buffers, from number `first` on.
struct BuffersUpdate {
    std::uint32_t first, reserved;
    std::uint64_t iovecs, tags;
    std::uint32_t count, reserved2;
};
static_assert(sizeof(BuffersUpdate) == 32);

// opcodes
inline constexpr std::uint8_t kNop = 0;
inline constexpr std::uint8_t kFsync = 3;
inline constexpr std::uint8_t kReadFixed = 4;
inline constexpr std::uint8_t kWriteFixed = 5;
inline constexpr std::uint8_t kPollAdd = 6;
inline constexpr std::uint8_t kAsyncCancel = 14;
inline constexpr std::uint8_t kRead = 22;
inline constexpr std::uint8_t kWrite = 23;

// flags of setup
inline constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;
inline constexpr std::uint32_t kSetupSingleIssuer = 1u << 12;
inline constexpr std::uint32_t kSetupDeferTaskrun = 1u << 13;

// features
inline constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
inline constexpr std::uint32_t kFeatureNoDrop = 1u << 1;
inline constexpr std::uint32_t kFeatureRwCurPos = 1u << 3;  // Linux 5.6, as kRead and kWrite
inline constexpr std::uint32_t kFeatureExtArg = 1u << 8;    // Linux 5.11

// enter, and requests
inline constexpr std::uint32_t kEnterGetEvents = 1u << 0;
inline constexpr std::uint32_t kEnterExtArg = 1u << 3;
inline constexpr std::uint32_t kFsyncDatasync = 1u << 0;

// opcodes of register
inline constexpr unsigned kRegisterBuffers = 0;
inline constexpr unsigned kUpdateBuffers = 16;  // Linux 5.13

// offsets of mmap
inline constexpr std::int64_t kOffsetSqRing = 0;
inline constexpr std::int64_t kOffsetSqes = 0x10000000;

}  // namespace aiokv::uring
