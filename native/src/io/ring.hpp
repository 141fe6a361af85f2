// Ring: the submission and the completion ring of one io_uring, shared with the kernel. All calls,
// from the constructor on, come from one thread.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "uring_abi.hpp"

namespace aiokv {

// The kernel, or the sandbox of the process, refuses io_uring.
struct RingRefused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Ring {
  public:
    static constexpr unsigned kMaxBuffers = 1u << 14;  // limit of the kernel

    // Throws RingRefused with the reason.
    explicit Ring(unsigned entries);
    ~Ring();  // the kernel must have ended all requests
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Returns a zeroed entry. If the ring is full of prepared entries, gives them to the kernel
    // first.
    uring::Sqe& prepare();

    // Number of prepared entries that the kernel has not accepted.
    unsigned prepared() const { return sq_tail_ - load(sq_head_); }

    // Gives prepared entries to the kernel. Returns 0 or the errno. Entries that were not accepted
    // stay prepared.
    int submit() { return enter(0, nullptr); }

    // Does the same as submit(), then blocks until a completion has arrived. Waits for `wanted`
    // completions, but at most `patience_ns` for those after the first: one wake-up serves several.
    int submit_and_wait(unsigned wanted, std::int64_t patience_ns);

    std::optional<uring::Cqe> next_completion();
    bool has_completion() const;

    // Registers memory as buffer number `number`, which has none yet. Requests may be in flight.
    // Returns 0 or the errno: EOPNOTSUPP before Linux 5.13.
    int register_buffer(unsigned number, iovec memory);

  private:
    struct Mapping {
        void* address = nullptr;
        std::size_t num_bytes = 0;
        ~Mapping();
        void map(int fd, std::size_t bytes, std::int64_t offset);
    };
    struct Descriptor {
        int fd = -1;
        ~Descriptor();
    };

    static std::uint32_t load(const std::uint32_t* value);
    void setup(unsigned entries);
    void map();
    void check_that_it_runs();
    int enter(unsigned wait_for, const uring::EnterArgument* argument);
    int register_table();
    int register_(unsigned opcode, const void* argument, unsigned count);

    uring::Params params_{};
    Descriptor ring_;
    Mapping rings_;
    Mapping sqes_mapping_;
    bool has_table_ = false;  // of registered buffers
    std::uint32_t* sq_head_ = nullptr;
    std::uint32_t* sq_shared_tail_ = nullptr;
    std::uint32_t sq_tail_ = 0;
    std::uint32_t sq_entries_ = 0;
    uring::Sqe* sqes_ = nullptr;
    std::uint32_t* cq_shared_head_ = nullptr;
    std::uint32_t* cq_tail_ = nullptr;
    std::uint32_t cq_head_ = 0;
    std::uint32_t cq_mask_ = 0;
    uring::Cqe* cqes_ = nullptr;
};

}  // namespace aiokv
