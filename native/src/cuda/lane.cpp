#include "aiokv/cuda_lane.hpp"

#include <time.h>

#include <algorithm>
#include <utility>

#include "aiokv/cuda_check.hpp"
#include "aiokv/cuda_host_copies.hpp"

namespace aiokv::cuda {
namespace {

// At most one transfer per staging slot is on the streams; one more is being prepared.
constexpr std::size_t kSpareIdBuffers = 2;
constexpr double kRateStep = 1.03;  // factor by which a poll changes the estimated link speed
constexpr double kSlowestLink = 1e9, kFastestLink = 200e9;  // bytes per second

double clock_seconds(clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void sleep_until(double seconds) {
    timespec time{};
    time.tv_sec = static_cast<time_t>(seconds);
    time.tv_nsec = static_cast<long>((seconds - static_cast<double>(time.tv_sec)) * 1e9);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr);
}

}  // namespace

Lane::Lane(Direction direction, LaneContext context, LaneStreams streams)
    : direction_(direction),
      context_(std::move(context)),
      streams_(streams),
      link_rate_(context_.options.link_bytes_per_second) {
    const EngineOptions& options = context_.options;
    const Layout& layout = context_.layout;
    slot_bytes_ = std::max(options.slot_bytes, layout.max_layer_bytes());
    try {
        check(cudaMalloc(reinterpret_cast<void**>(&staging_), slot_bytes_ * options.num_slots),
              "cudaMalloc for the staging ring");
        slot_users_.resize(options.num_slots);
        for (std::uint32_t i = 0; i < options.queued_pieces; ++i) {
            pieces_.push_back({context_.events->take(), context_.events->take()});
        }
        const std::size_t most =
            direction == Direction::kOnload ? layout.device_blocks : layout.host_blocks;
        for (std::size_t i = 0; i < options.num_slots + kSpareIdBuffers; ++i) {
            id_buffers_.push_back(std::make_unique<IdBuffer>(most, *context_.events));
        }
    } catch (...) {
        free_resources();
        throw;
    }
    thread_ = std::thread([this] { run(); });
    pthread_getcpuclockid(thread_.native_handle(), &thread_clock_);
}

Lane::~Lane() {
    try {
        close();
    } catch (const DeviceError&) {
        // The device is broken: its memory is freed when the process ends.
    }
}

void Lane::submit(std::shared_ptr<Transfer> transfer) {
    {
        std::lock_guard lock(mutex_);
        queue_.push_back(std::move(transfer));
    }
    changed_.notify_all();
}

void Lane::close() {
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
    }
    changed_.notify_all();
    if (!thread_.joinable()) {
        return;
    }
    thread_.join();
    const DeviceScope scope(context_.options.device);
    cudaStreamSynchronize(streams_.copy);  // an error here has reached its transfer already
    cudaStreamSynchronize(streams_.kernel);
    cudaGetLastError();
    free_resources();
}

void Lane::free_resources() {
    for (Piece& piece : pieces_) {
        context_.events->give(piece.crossed);
        context_.events->give(piece.done);
    }
    pieces_.clear();
    id_buffers_.clear();
    cudaFree(std::exchange(staging_, nullptr));
}

double Lane::cpu_seconds() const {
    return thread_.joinable() ? clock_seconds(thread_clock_) : final_cpu_seconds_;
}

void Lane::hold(bool held) {
    {
        std::lock_guard lock(mutex_);
        held_ = held;
    }
    changed_.notify_all();
}

void Lane::fail_at(std::uint32_t layer, int code) {
    std::lock_guard lock(mutex_);
    fail_layer_ = static_cast<int>(layer);
    fail_code_ = code;
}

cudaStream_t Lane::last_stream() const {
    return direction_ == Direction::kOnload ? streams_.kernel : streams_.copy;
}

void Lane::run() {
    pthread_setname_np(pthread_self(),
                       direction_ == Direction::kOnload ? "aiokv-onload" : "aiokv-offload");
    cudaSetDevice(context_.options.device);
    while (std::shared_ptr<Transfer> transfer = next()) {
        try {
            execute(*transfer);
        } catch (const DeviceError& error) {
            settle(*transfer, error);
        } catch (const std::exception& error) {
            settle(*transfer, DeviceError(error.what(), 0));
        }
        order_.clear();
    }
    final_cpu_seconds_ = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
}

std::shared_ptr<Transfer> Lane::next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) {
        return nullptr;
    }
    std::shared_ptr<Transfer> transfer = std::move(queue_.front());
    queue_.pop_front();
    return transfer;
}

void Lane::execute(Transfer& transfer) {
    const Request& request = transfer.request();
    const Layout& layout = context_.layout;
    context_.health->raise_if_broken();
    const std::size_t n = request.host_ids.size();
    Job job{&transfer, std::vector<std::int32_t>(n), std::vector<std::int32_t>(n),
            id_buffers_[next_ids_++ % id_buffers_.size()].get()};
    sort_by_id(request.host_ids, order_);
    for (std::size_t i = 0; i < n; ++i) {
        job.host_ids[i] = request.host_ids[order_[i]];
        job.device_ids[i] = request.device_ids[order_[i]];
    }
    ids_ = job.ids;
    rows_submitted_ = 0;
    last_group_ = false;
    transfer.plan(direction_ == Direction::kOnload
                      ? plan_onload(layout, {n, count_runs(job.host_ids)}, slot_bytes_,
                                    context_.options.planner, request.path)
                      : plan_offload(layout, slot_bytes_));
    if (n > 0) {
        context_.host.wait_ready((static_cast<std::size_t>(job.host_ids.back()) + 1) *
                                 layout.host_pitch);
    }
    job.ids->upload(job.device_ids, job.host_ids, streams_.kernel);
    if (request.after != nullptr) {
        check(cudaStreamWaitEvent(streams_.kernel, request.after, 0), "cudaStreamWaitEvent");
    }
    transfer.start(streams_.kernel);
    submit_groups(job);
}

void Lane::submit_groups(Job& job) {
    const std::vector<Group> groups = job.transfer->groups();
    for (std::size_t i = 0; i < groups.size(); ++i) {
        last_group_ = i + 1 == groups.size();
        submit_group(job, groups[i]);
        if (last_group_) {
            std::exchange(ids_, nullptr)->release(streams_.kernel);
        }
        job.transfer->submitted(i, last_stream());
    }
}

void Lane::submit_group(Job& job, const Group& group) {
    const std::size_t row_bytes = context_.layout.window(group.first_layer, group.end_layer).bytes;
    if (row_bytes == 0) {
        gate(group);
        return;
    }
    const std::size_t most = slot_bytes_ / row_bytes;
    for (std::size_t row = 0; row < job.host_ids.size();) {
        const std::size_t rows = std::min(most, job.host_ids.size() - row);
        gate(group);
        submit_piece(job, group, row, rows);
        row += rows;
        rows_submitted_ = row;
    }
    rows_submitted_ = last_group_ ? rows_submitted_ : 0;
}

void Lane::submit_piece(Job& job, const Group& group, std::size_t first_row, std::size_t num_rows) {
    pace();
    Piece& current = piece(next_piece_);
    const Window window = context_.layout.window(group.first_layer, group.end_layer);
    const EngineOptions& options = context_.options;
    if (direction_ == Direction::kOffload) {
        std::uint8_t* staging = take_slot(streams_.kernel);
        const Rows staged{staging, nullptr, window.bytes, window.offset};
        launch_gather(kernel_copy(job, group, first_row, num_rows, staged), options.staged_blocks,
                      streams_.kernel);
        check(cudaEventRecord(current.crossed, streams_.kernel), "cudaEventRecord");
        check(cudaStreamWaitEvent(streams_.copy, current.crossed, 0), "cudaStreamWaitEvent");
        copy_rows(job, window, first_row, num_rows, staging);
    } else if (group.path == Path::kDirect) {
        const Rows host{reinterpret_cast<std::uint8_t*>(context_.layout.host_base),
                        job.ids->host_ids() + first_row, context_.layout.host_pitch, 0};
        launch_direct(kernel_copy(job, group, first_row, num_rows, host), options.direct_blocks,
                      streams_.kernel);
    } else {
        std::uint8_t* staging = take_slot(streams_.copy);
        const Rows staged{staging, nullptr, window.bytes, window.offset};
        copy_rows(job, window, first_row, num_rows, staging);
        check(cudaEventRecord(current.crossed, streams_.copy), "cudaEventRecord");
        check(cudaStreamWaitEvent(streams_.kernel, current.crossed, 0), "cudaStreamWaitEvent");
        launch_scatter(kernel_copy(job, group, first_row, num_rows, staged), options.staged_blocks,
                       streams_.kernel);
    }
    check(cudaEventRecord(current.done, last_stream()), "cudaEventRecord");
    note_submitted(num_rows * window.bytes);
}

void Lane::gate(const Group& group) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !held_ || closing_; });
    if (fail_layer_ >= static_cast<int>(group.first_layer) &&
        fail_layer_ < static_cast<int>(group.end_layer)) {
        fail_layer_ = -1;
        check(static_cast<cudaError_t>(fail_code_), "injected");
    }
}

// The first command of a piece waits, on the device, for the last command of the piece that used
// the slot before.
std::uint8_t* Lane::take_slot(cudaStream_t first_stream) {
    const std::size_t slot = next_slot_++ % slot_users_.size();
    const std::size_t user_end = std::exchange(slot_users_[slot], next_piece_ + 1);
    if (user_end > moved_pieces_) {
        check(cudaStreamWaitEvent(first_stream, piece(user_end - 1).done, 0),
              "cudaStreamWaitEvent");
    }
    return staging_ + slot * slot_bytes_;
}

// Submitting commands without a sleep between them takes half the CPU time per command.
void Lane::pace() {
    if (next_piece_ - moved_pieces_ < pieces_.size()) {
        return;
    }
    const std::size_t moved = next_piece_ - pieces_.size() / 2;
    wait_for(moved - 1);
    moved_pieces_ = moved;
}

// Sleeping until the expected end and then querying once is the cheapest wait. Blocking in the
// driver takes twice as much CPU time; it is used when the estimate was too early. Each query
// adjusts the estimate a little, so that queries happen close to the end. The idle time after a
// late query must never count as a slow link, or the next query would be even later.
void Lane::wait_for(std::size_t number) {
    const Piece& waited = piece(number);
    if (waited.expected_end > clock_seconds(CLOCK_MONOTONIC)) {
        sleep_until(waited.expected_end);
    }
    const cudaError_t code = cudaEventQuery(waited.done);
    if (code == cudaErrorNotReady) {
        cudaGetLastError();
        check(cudaEventSynchronize(waited.done), "waiting for a piece");
        link_rate_ /= kRateStep;
    } else {
        check(code, "waiting for a piece");
        link_rate_ *= kRateStep;
    }
    // The work behind this piece began when the piece ended.
    expected_end_ = clock_seconds(CLOCK_MONOTONIC);
    for (std::size_t behind = number + 1; behind < next_piece_; ++behind) {
        expected_end_ += static_cast<double>(piece(behind).bytes) / link_rate_;
        piece(behind).expected_end = expected_end_;
    }
    link_rate_ = std::clamp(link_rate_, kSlowestLink, kFastestLink);
}

void Lane::note_submitted(std::size_t bytes) {
    expected_end_ = std::max(expected_end_, clock_seconds(CLOCK_MONOTONIC)) +
                    static_cast<double>(bytes) / link_rate_;
    piece(next_piece_).expected_end = expected_end_;
    piece(next_piece_).bytes = bytes;
    ++next_piece_;
}

void Lane::copy_rows(const Job& job, Window window, std::size_t first_row, std::size_t num_rows,
                     std::uint8_t* staging) {
    copies_.clear();
    append_host_copies(context_.layout, context_.host.chunk_bytes(),
                       std::span(job.host_ids).subspan(first_row, num_rows), window, copies_);
    submit_host_copies(copies_, direction_ == Direction::kOnload, staging,
                       context_.options.planner.min_strided_rows, streams_.copy);
}

KernelCopy Lane::kernel_copy(const Job& job, const Group& group, std::size_t first_row,
                             std::size_t num_rows, Rows rows) const {
    const Layout& layout = context_.layout;
    const std::uint32_t first = layout.layer_begin[group.first_layer];
    const std::uint32_t end = layout.layer_begin[group.end_layer];
    std::size_t largest = 0;
    for (std::uint32_t i = first; i < end; ++i) {
        largest = std::max(largest, layout.slices[i].bytes);
    }
    return {context_.device_slices + first,
            end - first,
            static_cast<std::uint32_t>((largest + kChunkBytes - 1) / kChunkBytes),
            job.ids->device_ids() + first_row,
            static_cast<std::uint32_t>(num_rows),
            rows};
}

void Lane::settle(Transfer& transfer, const DeviceError& error) {
    try {
        settle_failure(transfer, error);
    } catch (const DeviceError& second) {  // the device broke meanwhile: nothing can be waited for
        context_.health->break_with(second.code, second.what());
        transfer.fail({0, second.code, second.what()}, std::nullopt);
    }
}

// Submitted work still runs, so the transfer owns the blocks until that work has ended.
void Lane::settle_failure(Transfer& transfer, const DeviceError& error) {
    const cudaError_t state = cudaStreamQuery(last_stream());
    if (state != cudaSuccess && state != cudaErrorNotReady) {
        context_.health->break_with(static_cast<int>(state),
                                    describe(state, "submitting a transfer"));
    }
    cudaGetLastError();
    if (context_.health->broken()) {
        transfer.fail({0, error.code, error.what()}, std::nullopt);  // nothing runs any more
        return;
    }
    const cudaStream_t first = direction_ == Direction::kOnload ? streams_.copy : streams_.kernel;
    cudaEvent_t joint = context_.events->take();
    if (cudaEventRecord(joint, first) == cudaSuccess) {
        cudaStreamWaitEvent(last_stream(), joint, 0);
    }
    context_.events->give(joint);
    cudaGetLastError();
    if (ids_ != nullptr) {
        std::exchange(ids_, nullptr)->release(streams_.kernel);  // its kernels may still read it
    }
    transfer.fail({first_bad_block(), error.code, error.what()}, last_stream());
}

// Groups are copied one after the other: a block is complete when its row of the last group is.
std::uint32_t Lane::first_bad_block() const {
    if (!last_group_ || rows_submitted_ >= order_.size()) {
        return 0;
    }
    return *std::min_element(order_.begin() + static_cast<std::ptrdiff_t>(rows_submitted_),
                             order_.end());
}

}  // namespace aiokv::cuda
