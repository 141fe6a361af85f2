#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#include "aiokv/io_queue.hpp"
#include "check.hpp"
#include "completions.hpp"
#include "job_line.hpp"
#include "registered_buffers.hpp"
#include "transfer.hpp"
#include "uring_abi.hpp"
#include "wake_pace.hpp"

using namespace aiokv;

namespace {

constexpr std::size_t kPage = 4096;
constexpr IoBackendChoice kBoth[] = {IoBackendChoice::kIoUring, IoBackendChoice::kThreads};

// False, and says so, where a sandbox refuses io_uring.
bool can_use(IoBackendChoice choice) {
    try {
        IoQueue queue(1, choice);
        return true;
    } catch (const ConfigError& error) {
        std::printf("skip %s\n", error.what());
        return false;
    }
}

void on_each_backend(const std::function<void(IoBackendChoice)>& body) {
    for (const auto choice : kBoth) {
        if (can_use(choice)) body(choice);
    }
}

// A file without a name, in the build folder: O_DIRECT needs a real file system.
struct File {
    explicit File(std::size_t num_bytes = 0, int flags = 0) {
        char path[] = "test_io.XXXXXX";
        const int created = ::mkstemp(path);
        fd = ::open(path, O_RDWR | flags);
        ::unlink(path);
        ::close(created);
        CHECK(fd >= 0);
        CHECK_EQ(::ftruncate(fd, static_cast<off_t>(num_bytes)), 0);
    }
    ~File() { ::close(fd); }
    int fd;
};

struct Pipe {
    Pipe() { CHECK_EQ(::pipe2(ends, O_CLOEXEC), 0); }
    ~Pipe() {
        ::close(ends[0]);
        ::close(ends[1]);
    }
    int ends[2];
};

struct Memory {
    explicit Memory(std::size_t num_bytes, unsigned seed = 0) : size(num_bytes) {
        data = static_cast<std::uint8_t*>(std::aligned_alloc(kPage, num_bytes));
        std::mt19937 random(seed);
        for (std::size_t i = 0; i < size; ++i) {
            data[i] = seed == 0 ? 0 : static_cast<std::uint8_t>(random());
        }
    }
    ~Memory() { std::free(data); }
    std::uint64_t at(std::size_t offset) const {
        return reinterpret_cast<std::uint64_t>(data) + offset;
    }
    std::uint8_t* data;
    std::size_t size;
};

// Memory whose page faults wait until allocate(). False, and says so, where userfaultfd is refused.
class LatePages {
  public:
    explicit LatePages(std::size_t num_bytes)
        : size_(num_bytes),
          data_(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          fd_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC))) {
        uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
        uffdio_register range{range_(), UFFDIO_REGISTER_MODE_MISSING, 0};
        waits_ = fd_ >= 0 && ::ioctl(fd_, UFFDIO_API, &api) == 0 &&
                 ::ioctl(fd_, UFFDIO_REGISTER, &range) == 0;
        if (!waits_) std::printf("skip userfaultfd: %s\n", std::strerror(errno));
    }
    ~LatePages() {
        if (fd_ >= 0) ::close(fd_);
        ::munmap(data_, size_);
    }
    LatePages(const LatePages&) = delete;
    LatePages& operator=(const LatePages&) = delete;
    explicit operator bool() const { return waits_; }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }
    void allocate() const {
        uffdio_zeropage zero{range_(), 0, 0};
        CHECK_EQ(::ioctl(fd_, UFFDIO_ZEROPAGE, &zero), 0);
    }

  private:
    uffdio_range range_() const { return {address(), size_}; }

    std::size_t size_;
    void* data_;
    int fd_;
    bool waits_ = false;
};

bool readable(const IoQueue& queue, int timeout_ms) {
    pollfd poll{queue.fd(), POLLIN, 0};
    return ::poll(&poll, 1, timeout_ms) == 1;
}

// Waits for `count` results; they are removed.
std::map<std::uint64_t, std::int32_t> wait_for(IoQueue& queue, std::size_t count) {
    std::map<std::uint64_t, std::int32_t> results;
    while (results.size() < count) {
        if (!readable(queue, 30'000)) {
            check::fail(__FILE__, __LINE__, "no result within 30 s");
            break;
        }
        const auto some = queue.peek(7);
        for (const auto& one : some) results[one.tag] = one.result;
        queue.pop(some.size());
    }
    return results;
}

std::int32_t run_one(IoQueue& queue, IoRequest request) {
    request.tag = 77;
    queue.submit({&request, 1});
    return wait_for(queue, 1)[77];
}

// One request per block, in a random order of blocks in the file.
std::vector<IoRequest> requests_of(int fd, IoOperation operation, const Memory& memory,
                                   std::size_t block_bytes) {
    std::vector<std::size_t> order(memory.size / block_bytes);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < order.size(); ++i) {
        requests.push_back({.fd = fd,
                            .operation = operation,
                            .length = static_cast<std::uint32_t>(block_bytes),
                            .address = memory.at(i * block_bytes),
                            .offset = order[i] * block_bytes,
                            .tag = i});
    }
    return requests;
}

void check_round_trip(IoBackendChoice choice, std::size_t entries, std::size_t block_bytes,
                      std::size_t count, bool registers, int flags) {
    IoQueue queue(entries, choice);
    File file(0, flags);
    Memory written(block_bytes * count, 5), read(block_bytes * count);
    if (registers) {
        queue.register_buffer(written.at(0), written.size, 0);
        queue.register_buffer(read.at(0), read.size, 1);
        for (const auto& [tag, result] : wait_for(queue, 2)) {
            CHECK(result == 0 || result == -ENOMEM);  // RLIMIT_MEMLOCK
        }
    }
    for (const auto operation : {IoOperation::kWrite, IoOperation::kRead}) {
        const Memory& memory = operation == IoOperation::kWrite ? written : read;
        queue.submit(requests_of(file.fd, operation, memory, block_bytes));
        const auto results = wait_for(queue, count);
        CHECK_EQ(results.size(), count);
        for (const auto& [tag, result] : results) CHECK_EQ(result, std::int32_t(block_bytes));
    }
    CHECK(std::memcmp(written.data, read.data, written.size) == 0);
    CHECK_EQ(queue.pending(), 0u);
    CHECK(!readable(queue, 0));
}

}  // namespace

// --- parts ---------------------------------------------------------------------------------------

#if __has_include(<linux/io_uring.h>)
TEST(abi_is_that_of_the_kernel_headers) {
    CHECK_EQ(uring::kSysSetup, __NR_io_uring_setup);
    CHECK_EQ(uring::kSysEnter, __NR_io_uring_enter);
    CHECK_EQ(uring::kSysRegister, __NR_io_uring_register);
    CHECK_EQ(sizeof(uring::Sqe), sizeof(io_uring_sqe));
    CHECK_EQ(offsetof(uring::Sqe, offset), offsetof(io_uring_sqe, off));
    CHECK_EQ(offsetof(uring::Sqe, address), offsetof(io_uring_sqe, addr));
    CHECK_EQ(offsetof(uring::Sqe, length), offsetof(io_uring_sqe, len));
    CHECK_EQ(offsetof(uring::Sqe, op_flags), offsetof(io_uring_sqe, rw_flags));
    CHECK_EQ(offsetof(uring::Sqe, user_data), offsetof(io_uring_sqe, user_data));
    CHECK_EQ(offsetof(uring::Sqe, buffer_index), offsetof(io_uring_sqe, buf_index));
    CHECK_EQ(sizeof(uring::Params), sizeof(io_uring_params));
    CHECK_EQ(offsetof(uring::Params, features), offsetof(io_uring_params, features));
    CHECK_EQ(offsetof(uring::Params, sq), offsetof(io_uring_params, sq_off));
    CHECK_EQ(offsetof(uring::Params, cq), offsetof(io_uring_params, cq_off));
    CHECK_EQ(offsetof(uring::SqOffsets, array), offsetof(io_sqring_offsets, array));
    CHECK_EQ(offsetof(uring::CqOffsets, cqes), offsetof(io_cqring_offsets, cqes));
    CHECK_EQ(+uring::kNop, int(IORING_OP_NOP));
    CHECK_EQ(+uring::kFsync, int(IORING_OP_FSYNC));
    CHECK_EQ(+uring::kReadFixed, int(IORING_OP_READ_FIXED));
    CHECK_EQ(+uring::kWriteFixed, int(IORING_OP_WRITE_FIXED));
    CHECK_EQ(+uring::kPollAdd, int(IORING_OP_POLL_ADD));
    CHECK_EQ(+uring::kAsyncCancel, int(IORING_OP_ASYNC_CANCEL));
    CHECK_EQ(+uring::kRead, int(IORING_OP_READ));
    CHECK_EQ(+uring::kWrite, int(IORING_OP_WRITE));
    CHECK_EQ(uring::kEnterGetEvents, IORING_ENTER_GETEVENTS);
    CHECK_EQ(uring::kFsyncDatasync, IORING_FSYNC_DATASYNC);
    CHECK_EQ(uring::kRegisterBuffers, unsigned(IORING_REGISTER_BUFFERS));
    CHECK_EQ(uring::kOffsetSqRing, std::int64_t(IORING_OFF_SQ_RING));
    CHECK_EQ(uring::kOffsetSqes, std::int64_t(IORING_OFF_SQES));
#ifdef IORING_FEAT_RW_CUR_POS
    CHECK_EQ(uring::kFeatureSingleMmap, IORING_FEAT_SINGLE_MMAP);
    CHECK_EQ(uring::kFeatureNoDrop, IORING_FEAT_NODROP);
    CHECK_EQ(uring::kFeatureRwCurPos, IORING_FEAT_RW_CUR_POS);
#endif
#ifdef IORING_RSRC_REGISTER_SPARSE
    CHECK_EQ(uring::kUpdateBuffers, unsigned(IORING_REGISTER_BUFFERS_UPDATE));
    CHECK_EQ(sizeof(uring::BuffersUpdate), sizeof(io_uring_rsrc_update2));
    CHECK_EQ(offsetof(uring::BuffersUpdate, iovecs), offsetof(io_uring_rsrc_update2, data));
    CHECK_EQ(offsetof(uring::BuffersUpdate, count), offsetof(io_uring_rsrc_update2, nr));
#endif
#ifdef IORING_FEAT_EXT_ARG
    CHECK_EQ(uring::kFeatureExtArg, IORING_FEAT_EXT_ARG);
    CHECK_EQ(uring::kEnterExtArg, IORING_ENTER_EXT_ARG);
    CHECK_EQ(sizeof(uring::EnterArgument), sizeof(io_uring_getevents_arg));
    CHECK_EQ(offsetof(uring::EnterArgument, timespec), offsetof(io_uring_getevents_arg, ts));
#endif
#ifdef IORING_SETUP_DEFER_TASKRUN
    CHECK_EQ(uring::kSetupCoopTaskrun, IORING_SETUP_COOP_TASKRUN);
    CHECK_EQ(uring::kSetupSingleIssuer, IORING_SETUP_SINGLE_ISSUER);
    CHECK_EQ(uring::kSetupDeferTaskrun, IORING_SETUP_DEFER_TASKRUN);
#endif
}
#endif

namespace {

Transfer transfer_of(IoOperation operation) {
    return Transfer({.request = {.operation = operation,
                                 .length = 8192,
                                 .address = 1'000'000,
                                 .offset = 4096,
                                 .tag = 9},
                     .batch = 1});
}

}  // namespace

TEST(transfer_goes_on_behind_the_bytes_that_were_moved) {
    for (const auto operation : {IoOperation::kRead, IoOperation::kWrite}) {
        Transfer transfer = transfer_of(operation);
        CHECK(!transfer.advance(1024));
        CHECK_EQ(transfer.address(), 1'001'024u);
        CHECK_EQ(transfer.offset(), 5120u);
        CHECK_EQ(transfer.length(), 7168u);
        CHECK(!transfer.ended());
        CHECK(transfer.advance(7168));
        CHECK_EQ(transfer.result(), 8192);
        CHECK(transfer.ended());
    }
}

TEST(transfer_ends_where_the_file_ends) {
    Transfer empty = transfer_of(IoOperation::kRead);
    CHECK(!empty.advance(512));
    CHECK(empty.advance(0));
    CHECK_EQ(empty.result(), 512);

    Transfer odd = transfer_of(IoOperation::kRead);
    CHECK(odd.advance(700));  // at its end a file gives fewer bytes than a sector
    CHECK_EQ(odd.result(), 700);

    Transfer refused = transfer_of(IoOperation::kRead);
    CHECK(!refused.advance(512));
    CHECK(refused.advance(-EINVAL));
    CHECK_EQ(refused.result(), 512);
}

TEST(transfer_reports_the_failure_of_a_partly_written_request) {
    Transfer full = transfer_of(IoOperation::kWrite);
    CHECK(!full.advance(700));
    CHECK(full.advance(-ENOSPC));
    CHECK_EQ(full.result(), -ENOSPC);

    Transfer stuck = transfer_of(IoOperation::kWrite);
    CHECK(stuck.advance(0));
    CHECK_EQ(stuck.result(), -EIO);

    Transfer unaligned = transfer_of(IoOperation::kWrite);
    CHECK(!unaligned.advance(512));
    CHECK(unaligned.advance(-EINVAL));
    CHECK_EQ(unaligned.result(), -EINVAL);
}

TEST(transfer_is_tried_again_after_an_interruption_but_not_for_ever) {
    for (const int error : {EINTR, EAGAIN}) {
        Transfer transfer = transfer_of(IoOperation::kRead);
        int attempts = 1;
        while (!transfer.advance(-error)) ++attempts;
        CHECK_EQ(attempts, kMaxAttempts);
        CHECK_EQ(transfer.result(), -error);
    }
    Transfer transfer = transfer_of(IoOperation::kRead);
    for (int i = 1; i < kMaxAttempts; ++i) CHECK(!transfer.advance(-EAGAIN));
    CHECK(!transfer.advance(4096));  // progress: the attempts count anew
    CHECK(!transfer.advance(-EAGAIN));
}

TEST(transfer_that_is_cancelled_is_not_continued) {
    Transfer part = transfer_of(IoOperation::kRead);
    part.cancel();
    CHECK(part.advance(512));
    CHECK_EQ(part.result(), -ECANCELED);

    Transfer interrupted = transfer_of(IoOperation::kWrite);
    interrupted.cancel();
    CHECK(interrupted.advance(-EINTR));
    CHECK_EQ(interrupted.result(), -ECANCELED);

    Transfer whole = transfer_of(IoOperation::kRead);
    whole.cancel();
    CHECK(whole.advance(8192));
    CHECK_EQ(whole.result(), 8192);
}

TEST(registered_buffers_are_found_by_address) {
    RegisteredBuffers buffers;
    const auto find = [&](std::uint64_t address, std::uint32_t length) {
        const auto found = buffers.find(address, length);
        return found ? int(*found) : -1;
    };
    CHECK_EQ(find(1, 1), -1);
    buffers.add(16 * kPage, 4 * kPage);
    buffers.add(20 * kPage, kPage);
    buffers.add(8 * kPage, kPage);
    CHECK_EQ(buffers.size(), 3u);
    CHECK_EQ(find(16 * kPage, 4 * kPage), 0);
    CHECK_EQ(find(19 * kPage, kPage), 0);
    CHECK_EQ(find(20 * kPage, kPage), 1);
    CHECK_EQ(find(8 * kPage, kPage), 2);
    CHECK_EQ(find(19 * kPage, 2 * kPage), -1);  // in two buffers
    CHECK_EQ(find(20 * kPage, 2 * kPage), -1);
    CHECK_EQ(find(8 * kPage - 1, 1), -1);
    CHECK_EQ(find(9 * kPage, 1), -1);
    CHECK_EQ(find(0, 1), -1);
}

TEST(completions_are_announced_when_their_batch_is_complete) {
    IoCompletions completions;
    const auto readable = [&] {
        pollfd poll{completions.fd(), POLLIN, 0};
        return ::poll(&poll, 1, 0) == 1;
    };
    const IoJob first{.request = {.tag = 1}, .batch = completions.open(2)};
    const IoJob other{.request = {.tag = 2}, .batch = completions.open(1)};
    completions.end(first, 10);
    CHECK(!readable());
    CHECK_EQ(completions.peek(9).size(), 1u);
    completions.end(other, 20);
    CHECK(readable());
    CHECK_EQ(completions.peek(1).size(), 1u);
    completions.pop(1);
    CHECK(readable());
    completions.pop(1);
    CHECK(!readable());
    CHECK_EQ(completions.pending(), 1u);
    completions.end(first, 11);
    CHECK(readable());
    CHECK_EQ(completions.peek(9).front().result, 11);
    CHECK_THROWS(UsageError, completions.pop(2));
    completions.pop(1);
    CHECK_EQ(completions.pending(), 0u);
}

TEST(reads_go_before_writes_which_still_have_their_turn) {
    IoCompletions completions;
    JobLine line(completions);
    std::vector<IoRequest> requests(40);
    for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i].tag = i;
        requests[i].operation = i < 10 ? IoOperation::kWrite : IoOperation::kRead;
    }
    line.append(requests, completions.open(requests.size()));
    std::vector<std::uint64_t> taken;
    for (int i = 0; i < 16; ++i) taken.push_back(line.take().request.tag);
    CHECK((taken == std::vector<std::uint64_t>{10, 11, 12, 13, 14, 15, 16, 0, 17, 18, 19, 20, 21,
                                               22, 23, 1}));
    line.cancel({2, 24});
    CHECK_EQ(completions.peek(9).size(), 2u);
    std::size_t left = 0;
    for (; !line.empty(); ++left) line.take();
    CHECK_EQ(left, 22u);
}

TEST(reads_are_taken_alone_while_the_kernel_has_enough_writes) {
    IoCompletions completions;
    JobLine line(completions);
    std::vector<IoRequest> requests(20);
    for (std::size_t i = 0; i < requests.size(); ++i) {
        requests[i].tag = i;
        requests[i].operation = i < 10 ? IoOperation::kWrite : IoOperation::kRead;
    }
    line.append(requests, completions.open(requests.size()));
    for (std::uint64_t tag = 10; tag < 20; ++tag) {
        CHECK(line.has_reads());
        CHECK_EQ(line.take(false).request.tag, tag);
    }
    CHECK(!line.has_reads() && !line.empty());
    CHECK_EQ(line.take().request.tag, 0u);
}

TEST(wake_pace_sleeps_for_several_only_while_many_are_in_flight) {
    WakePace pace;
    CHECK_EQ(pace.wanted(64), 1u);  // nothing is known about the device
    pace.count(64, true);
    for (int i = 0; i < 100; ++i) pace.count(1'000'000, true);
    CHECK_EQ(pace.wanted(64), 64u / WakePace::kMaxShare);
    CHECK_EQ(pace.wanted(WakePace::kMaxShare), 1u);
    CHECK_EQ(pace.wanted(1), 1u);
}

// --- the queue, on both backends -----------------------------------------------------------------

TEST(queue_moves_the_bytes_of_thousands_of_requests) {
    on_each_backend([](IoBackendChoice choice) {
        check_round_trip(choice, 8, kPage, 5000, false, 0);
        check_round_trip(choice, 64, kPage, 2000, true, O_DIRECT);
        check_round_trip(choice, 1, 3 * kPage, 50, true, O_DIRECT);
        check_round_trip(choice, 4096, kPage, 100, false, O_DIRECT);
    });
}

TEST(queue_uses_what_was_chosen_and_says_why) {
    IoQueue threads(4, IoBackendChoice::kThreads);
    CHECK_EQ(std::string(threads.backend()), "threads");
    CHECK(!threads.reason().empty());
    if (!can_use(IoBackendChoice::kIoUring)) return;
    IoQueue ring(4, IoBackendChoice::kAuto);
    CHECK_EQ(std::string(ring.backend()), "io_uring");
    CHECK_EQ(ring.reason(), "");
}

TEST(queue_refuses_a_wrong_number_of_entries) {
    CHECK_THROWS(ConfigError, IoQueue(0, IoBackendChoice::kAuto));
    CHECK_THROWS(ConfigError, IoQueue(kMaxIoEntries + 1, IoBackendChoice::kAuto));
}

TEST(queue_reports_errors_of_the_kernel_per_request) {
    on_each_backend([](IoBackendChoice choice) {
        IoQueue queue(4, choice);
        File file(kPage);
        Memory memory(kPage, 3);
        const std::vector<IoRequest> requests = {
            {.fd = 100'000, .length = 8, .address = memory.at(0), .tag = 0},
            {.fd = file.fd, .length = 8, .address = memory.at(0), .tag = 1},
            {.fd = file.fd, .length = 8, .address = 64, .tag = 2},
            {.fd = 100'000, .operation = IoOperation::kFlush, .tag = 3},
            {.fd = file.fd, .operation = IoOperation::kFlush, .tag = 4},
            {.fd = file.fd, .operation = IoOperation::kWrite, .address = memory.at(0), .tag = 5},
        };
        queue.submit(requests);
        auto results = wait_for(queue, requests.size());
        CHECK_EQ(results[0], -EBADF);
        CHECK_EQ(results[1], 8);
        CHECK_EQ(results[2], -EFAULT);
        CHECK_EQ(results[3], -EBADF);
        CHECK_EQ(results[4], 0);
        CHECK_EQ(results[5], 0);
    });
}

TEST(queue_reports_a_full_medium) {
    on_each_backend([](IoBackendChoice choice) {
        IoQueue queue(4, choice);
        Memory memory(kPage, 3);
        const int full = ::open("/dev/full", O_WRONLY);
        CHECK_EQ(run_one(queue, {.fd = full,
                                 .operation = IoOperation::kWrite,
                                 .length = 8,
                                 .address = memory.at(0)}),
                 -ENOSPC);
        ::close(full);
    });
}

TEST(queue_continues_a_short_write_and_reports_its_failure) {
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit six_kib{6144, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &six_kib);
    on_each_backend([](IoBackendChoice choice) {
        IoQueue queue(4, choice);
        File file;
        Memory memory(2 * kPage, 3);
        CHECK_EQ(run_one(queue, {.fd = file.fd,
                                 .operation = IoOperation::kWrite,
                                 .length = 2 * kPage,
                                 .address = memory.at(0)}),
                 -EFBIG);
        CHECK_EQ(::lseek(file.fd, 0, SEEK_END), 6144);
    });
    ::setrlimit(RLIMIT_FSIZE, &before);
}

TEST(queue_returns_fewer_bytes_where_the_file_ends) {
    on_each_backend([](IoBackendChoice choice) {
        for (const int flags : {0, O_DIRECT}) {
            for (const std::size_t file_bytes : {std::size_t{0}, std::size_t{5000}, kPage}) {
                IoQueue queue(4, choice);
                File file(file_bytes, flags);
                Memory memory(2 * kPage, 3);
                CHECK_EQ(
                    run_one(queue, {.fd = file.fd, .length = 2 * kPage, .address = memory.at(0)}),
                    std::int32_t(file_bytes));
            }
        }
    });
}

TEST(queue_refuses_requests_before_the_first_one_starts) {
    on_each_backend([](IoBackendChoice choice) {
        IoQueue queue(4, choice);
        File direct(kPage, O_DIRECT), plain(kPage);
        Memory memory(2 * kPage);
        const IoRequest good{.fd = direct.fd, .length = kPage, .address = memory.at(0)};
        for (const int wrong : {0, 1, 2}) {
            IoRequest bad = good;
            if (wrong == 0) bad.address += 512;
            if (wrong == 1) bad.length -= 512;
            if (wrong == 2) bad.offset += 512;
            CHECK_THROWS(LayoutError, queue.submit(std::vector{good, bad}));
            bad.fd = plain.fd;
            CHECK(run_one(queue, bad) > 0);
        }
        IoRequest huge = good;
        huge.length = kMaxIoBytes + 1;
        CHECK_THROWS(LayoutError, queue.submit({&huge, 1}));
        IoRequest far = good;
        far.offset = ~std::uint64_t{0} - kPage + 1;
        CHECK_THROWS(LayoutError, queue.submit({&far, 1}));
        CHECK_EQ(queue.pending(), 0u);
    });
}

TEST(queue_works_with_memory_that_the_kernel_does_not_register) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    IoQueue queue(4, IoBackendChoice::kIoUring);
    File file(kPage);
    Memory memory(kPage, 3);
    // After a refusal nothing is registered, and the pages of two registrations are allocated at a
    // time: the second one begins when the first has ended.
    queue.register_buffer(memory.at(0), kPage, 1);
    CHECK_EQ(wait_for(queue, 1)[1], 0);
    queue.register_buffer(4096, kPage, 2);  // not mapped
    CHECK_EQ(wait_for(queue, 1)[2], -EFAULT);
    CHECK_EQ(run_one(queue, {.fd = file.fd, .length = kPage, .address = memory.at(0)}), int(kPage));
    CHECK_EQ(memory.data[17], 0);
}

TEST(close_waits_for_requests_in_flight_and_cancels_the_others) {
    on_each_backend([](IoBackendChoice choice) {
        constexpr std::size_t kCount = 3000;
        IoQueue queue(16, choice);
        File file(0, O_DIRECT);
        Memory memory(kPage * kCount, 7), found(kPage * kCount);
        queue.submit(requests_of(file.fd, IoOperation::kWrite, memory, kPage));
        queue.close();
        queue.close();
        CHECK_EQ(queue.fd(), -1);
        CHECK_EQ(queue.pending(), kCount);
        const auto results = queue.peek(kCount);
        CHECK_EQ(results.size(), kCount);
        queue.pop(kCount);
        const auto requests = requests_of(file.fd, IoOperation::kWrite, memory, kPage);
        for (const auto& [tag, result] : results) {
            CHECK(result == int(kPage) || result == -ECANCELED);
            if (result < 0) continue;
            ::pread(file.fd, found.data, kPage, static_cast<off_t>(requests[tag].offset));
            CHECK(std::memcmp(found.data, memory.data + tag * kPage, kPage) == 0);
        }
        CHECK_THROWS(UsageError, queue.submit(requests));
        CHECK_THROWS(UsageError, queue.register_buffer(memory.at(0), kPage, 1));
        CHECK_THROWS(UsageError, queue.cancel({}));
    });
}

TEST(cancel_ends_what_has_not_started) {
    on_each_backend([](IoBackendChoice choice) {
        constexpr std::size_t kCount = 3000;
        IoQueue queue(1, choice);
        File file(kPage * kCount);
        Memory memory(kPage * kCount);
        queue.submit(requests_of(file.fd, IoOperation::kRead, memory, kPage));
        std::vector<std::uint64_t> tags(kCount);
        std::iota(tags.begin(), tags.end(), 0);
        queue.cancel(tags);
        const auto results = wait_for(queue, kCount);
        for (const auto& [tag, result] : results) {
            CHECK(result == int(kPage) || result == -ECANCELED);
        }
        queue.cancel(tags);  // all have ended
        CHECK_EQ(run_one(queue, {.fd = file.fd, .length = 1, .address = memory.at(0)}), 1);
    });
}

TEST(cancel_and_close_end_a_request_that_the_kernel_cannot_end) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    Pipe pipe;
    File file(kPage);
    Memory memory(kPage);
    const std::vector<IoRequest> requests = {
        {.fd = pipe.ends[0], .length = 8, .address = memory.at(0), .tag = 1},
        {.fd = pipe.ends[0], .length = 8, .address = memory.at(8), .tag = 2},
    };
    IoQueue queue(3, IoBackendChoice::kIoUring);
    for (const auto& request : requests) queue.submit({&request, 1});
    // When a later request has ended, these are in the kernel.
    CHECK_EQ(run_one(queue, {.fd = file.fd, .length = 8, .address = memory.at(16)}), 8);
    const std::uint64_t first = 1;
    queue.cancel({&first, 1});
    CHECK_EQ(wait_for(queue, 1)[1], -ECANCELED);
    CHECK_EQ(queue.pending(), 1u);
    queue.close();
    CHECK_EQ(queue.peek(9).front().result, -ECANCELED);
}

TEST(commands_are_taken_while_requests_are_in_the_kernel) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    Pipe pipe;
    File file(kPage);
    Memory memory(kPage);
    IoQueue queue(2, IoBackendChoice::kIoUring);
    const IoRequest stuck{.fd = pipe.ends[0], .length = 8, .address = memory.at(0), .tag = 1};
    queue.submit({&stuck, 1});
    for (int i = 0; i < 100; ++i) {
        CHECK_EQ(run_one(queue, {.fd = file.fd, .length = 8, .address = memory.at(8)}), 8);
    }
    queue.register_buffer(memory.at(0), kPage, 2);
    const int registered = wait_for(queue, 1)[2];
    CHECK(registered == 0 || registered == -ENOMEM || registered == -EOPNOTSUPP);
    CHECK_EQ(run_one(queue, {.fd = file.fd, .length = 8, .address = memory.at(8)}), 8);
    CHECK_EQ(::write(pipe.ends[1], "12345678", 8), 8);
    CHECK_EQ(wait_for(queue, 1)[1], 8);
}

TEST(requests_do_not_wait_for_the_pages_of_a_registration) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    const LatePages late(kPage);
    if (!late) return;
    File file(kPage);
    Memory memory(kPage);
    IoQueue queue(2, IoBackendChoice::kIoUring);
    queue.register_buffer(late.address(), kPage, 1);
    for (int i = 0; i < 100; ++i) {
        CHECK_EQ(run_one(queue, {.fd = file.fd, .length = 8, .address = memory.at(8)}), 8);
    }
    late.allocate();
    CHECK_EQ(wait_for(queue, 1)[1], 0);
}

TEST(cancel_ends_a_registration_whose_pages_are_not_allocated_yet) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    const LatePages late(kPage);
    if (!late) return;
    IoQueue queue(2, IoBackendChoice::kIoUring);
    queue.register_buffer(late.address(), kPage, 1);
    const std::uint64_t tag = 1;
    queue.cancel({&tag, 1});
    late.allocate();
    CHECK_EQ(wait_for(queue, 1)[1], -ECANCELED);
}

TEST(reads_pass_writes_that_wait_because_the_kernel_has_enough_of_them) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    constexpr std::size_t kMany = std::size_t{32} << 20;
    Pipe pipe;
    File file(kPage);
    Memory memory(kMany);
    IoQueue queue(8, IoBackendChoice::kIoUring);
    const IoRequest stuck{.fd = pipe.ends[1],
                          .operation = IoOperation::kWrite,
                          .length = kMany,
                          .address = memory.at(0),
                          .tag = 1};
    queue.submit({&stuck, 1});
    const IoRequest waiting{.fd = file.fd,
                            .operation = IoOperation::kWrite,
                            .length = 8,
                            .address = memory.at(0),
                            .tag = 2};
    queue.submit({&waiting, 1});
    const IoRequest read{.fd = file.fd, .length = 8, .address = memory.at(8), .tag = 3};
    queue.submit({&read, 1});
    CHECK_EQ(wait_for(queue, 1)[3], 8);
    CHECK_EQ(queue.pending(), 2u);
    std::vector<std::uint8_t> bytes(1 << 20);
    for (std::size_t moved = 0; moved < kMany;) {
        const ssize_t some = ::read(pipe.ends[0], bytes.data(), bytes.size());
        CHECK(some > 0);
        moved += static_cast<std::size_t>(some);
    }
    auto results = wait_for(queue, 2);
    CHECK_EQ(results[1], static_cast<std::int32_t>(kMany));
    CHECK_EQ(results[2], 8);
}

TEST(queue_continues_a_short_read_behind_its_first_bytes) {
    if (!can_use(IoBackendChoice::kIoUring)) return;
    Pipe pipe;
    Memory source(2 * kPage, 9), found(3 * kPage);
    IoQueue queue(2, IoBackendChoice::kIoUring);
    queue.register_buffer(found.at(0), found.size, 1);
    wait_for(queue, 1);
    const IoRequest request{
        .fd = pipe.ends[0], .length = 2 * kPage, .address = found.at(kPage), .tag = 2};
    queue.submit({&request, 1});
    for (const std::size_t part : {std::size_t{0}, kPage}) {
        CHECK_EQ(::write(pipe.ends[1], source.data + part, kPage), int(kPage));
        for (int left = 1; left > 0;) ::ioctl(pipe.ends[0], FIONREAD, &left);  // until it is read
    }
    CHECK_EQ(wait_for(queue, 1)[2], int(2 * kPage));
    CHECK(std::memcmp(found.data + kPage, source.data, source.size) == 0);
}

TEST(destroyed_queue_does_not_touch_memory_any_more) {
    on_each_backend([](IoBackendChoice choice) {
        constexpr std::size_t kCount = 500;
        File file(kPage * kCount, O_DIRECT);
        auto memory = std::make_unique<Memory>(kPage * kCount);
        auto queue = std::make_unique<IoQueue>(32, choice);
        queue->submit(requests_of(file.fd, IoOperation::kRead, *memory, kPage));
        queue.reset();
        ::mprotect(memory->data, memory->size, PROT_NONE);
        ::mprotect(memory->data, memory->size, PROT_READ | PROT_WRITE);
    });
}

// --- other processes -----------------------------------------------------------------------------

namespace {

// The exit code of a forked child that runs `body`.
int code_of_child(const std::function<int()>& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body());
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// From now on this process gets `error` from a system call.
void refuse_call(long number, int error) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{4, filter};
    ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) ::_exit(99);
}

}  // namespace

TEST(forked_child_cannot_use_the_queue_of_its_parent) {
    on_each_backend([](IoBackendChoice choice) {
        File file(kPage);
        Memory memory(kPage);
        auto queue = std::make_unique<IoQueue>(4, choice);
        const IoRequest request{.fd = file.fd, .length = 8, .address = memory.at(0)};
        CHECK_EQ(run_one(*queue, request), 8);
        CHECK_EQ(code_of_child([&] {
                     int refused = 0;
                     const auto count = [&](const auto& call) {
                         try {
                             call();
                         } catch (const UsageError&) {
                             ++refused;
                         }
                     };
                     count([&] { queue->submit({&request, 1}); });
                     count([&] { queue->peek(1); });
                     count([&] { queue->pop(0); });
                     count([&] { queue->cancel({}); });
                     count([&] { queue->register_buffer(memory.at(0), 1, 1); });
                     count([&] { queue->close(); });
                     queue.reset();
                     IoQueue own(4, choice);
                     return run_one(own, request) == 8 ? refused : 100;
                 }),
                 6);
        CHECK_EQ(run_one(*queue, request), 8);
    });
}

TEST(threads_replace_an_io_uring_that_is_refused) {
    File file(kPage);
    Memory memory(kPage);
    const IoRequest request{.fd = file.fd, .length = 8, .address = memory.at(0)};
    const std::pair<long, int> refusals[] = {
        {uring::kSysSetup, ENOSYS}, {uring::kSysSetup, EPERM}, {uring::kSysEnter, EPERM}};
    for (const auto& [call, error] : refusals) {
        CHECK_EQ(code_of_child([&, call = call, error = error] {
                     refuse_call(call, error);
                     IoQueue queue(4, IoBackendChoice::kAuto);
                     if (std::string(queue.backend()) != "threads") return 1;
                     if (queue.reason().find(std::strerror(error)) == std::string::npos) return 2;
                     if (run_one(queue, request) != 8) return 3;
                     try {
                         IoQueue forced(4, IoBackendChoice::kIoUring);
                         return 4;
                     } catch (const ConfigError&) {
                         return 0;
                     }
                 }),
                 0);
    }
}
