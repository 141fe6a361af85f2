#include "ring_backend.hpp"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <future>

#include "populate.hpp"
#include "ring_loop.hpp"

namespace aiokv {

RingBackend::RingBackend(std::size_t entries, IoCompletions& completions)
    : completions_(completions), commands_(completions) {
    std::promise<void> opened;
    thread_ = std::thread([&, entries] {
        std::optional<RingLoop> loop;
        try {
            loop.emplace(entries, commands_, completions);
        } catch (...) {
            opened.set_exception(std::current_exception());
            return;
        }
        opened.set_value();
        loop->run();
    });
    pthread_setname_np(thread_.native_handle(), "aiokv-io");
    try {
        opened.get_future().get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

void RingBackend::register_buffer(std::uint64_t address, std::size_t num_bytes, IoJob job) {
    if (!may_lock(num_bytes)) {
        completions_.end(job, -ENOMEM);
        return;
    }
    std::lock_guard lock(mutex_);
    populations_[job.request.tag] = std::jthread([=, this](const std::stop_token& stop) {
        ::pthread_setname_np(::pthread_self(), "aiokv-io-pages");
        std::size_t begin = 0;
        do {
            const std::size_t piece = std::min(kPieceBytes, num_bytes - begin);
            populate(address + begin, piece, stop);
            if (stop.stop_requested()) {
                completions_.end(job, -ECANCELED);
                return;
            }
            const bool is_last = begin + piece == num_bytes;
            commands_.register_buffer({address + begin, piece, job, is_last});
            begin += piece;
        } while (begin < num_bytes);
    });
}

void RingBackend::submit(std::span<const IoRequest> requests, std::uint64_t batch) {
    commands_.submit(requests, batch);
}

void RingBackend::cancel(std::span<const std::uint64_t> tags) {
    {
        std::lock_guard lock(mutex_);
        for (const auto tag : tags) {
            if (const auto found = populations_.find(tag); found != populations_.end()) {
                found->second.request_stop();
            }
        }
    }
    commands_.cancel(TagSet(tags.begin(), tags.end()));
}

void RingBackend::close() {
    if (!thread_.joinable()) return;
    for (auto& [tag, population] : populations_) population.request_stop();
    populations_.clear();
    commands_.close();
    thread_.join();
}

}  // namespace aiokv
