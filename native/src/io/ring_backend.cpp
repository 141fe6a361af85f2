#include "ring_backend.hpp"

#include <pthread.h>

#include <future>

#include "ring_loop.hpp"

namespace aiokv {

RingBackend::RingBackend(std::size_t entries, IoCompletions& completions) : commands_(completions) {
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
    commands_.register_buffer({address, num_bytes, job});
}

void RingBackend::submit(std::span<const IoRequest> requests, std::uint64_t batch) {
    commands_.submit(requests, batch);
}

void RingBackend::cancel(std::span<const std::uint64_t> tags) {
    commands_.cancel(TagSet(tags.begin(), tags.end()));
}

void RingBackend::close() {
    if (!thread_.joinable()) return;
    commands_.close();
    thread_.join();
}

}  // namespace aiokv
