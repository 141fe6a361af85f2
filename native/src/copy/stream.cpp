#include "aiokv/stream.hpp"

#include <pthread.h>

#include <utility>

namespace aiokv {

namespace {
constexpr const char* kAborted = "the stream was aborted";
}

Stream::Stream(std::string name) : name_(std::move(name)) {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());
}

Stream::~Stream() {
    abort();
}

void Stream::push(Work work) {
    {
        std::lock_guard lock(mutex_);
        if (closed_) throw UsageError("stream " + name_ + " is closed");
        queue_.push_back(std::move(work));
    }
    wakeup_.notify_one();
}

void Stream::record(std::shared_ptr<Event> event) {
    {
        // The generation is opened under the queue's lock, so the queue is in order of generations.
        std::lock_guard lock(mutex_);
        if (closed_) throw UsageError("stream " + name_ + " is closed");
        const auto generation = event->open();
        queue_.push_back([event = std::move(event), generation](const std::atomic<bool>& stop) {
            event->finish(generation, stop ? kAborted : "");
        });
    }
    wakeup_.notify_one();
}

void Stream::wait_event(std::shared_ptr<Event> event) {
    const auto generation = event->generation();
    if (generation == 0) {
        throw UsageError("stream " + name_ + " cannot wait for an event that was never recorded");
    }
    if (event->done()) return;
    push([this, event = std::move(event), generation](const std::atomic<bool>&) {
        wait_here(*event, generation);
    });
}

void Stream::wait_here(const Event& event, std::uint64_t generation) {
    {
        std::lock_guard lock(mutex_);
        waiting_on_ = &event;
    }
    event.wait(generation, stop_);
    std::lock_guard lock(mutex_);
    waiting_on_ = nullptr;
}

void Stream::synchronize() {
    auto event = std::make_shared<Event>();
    record(event);
    event->synchronize();
}

std::size_t Stream::depth() const {
    std::lock_guard lock(mutex_);
    return queue_.size() + (busy_ ? 1 : 0);
}

void Stream::close() {
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
    }
    wakeup_.notify_one();
    join();
}

void Stream::abort() {
    stop_.store(true, std::memory_order_release);
    {
        // wait_here() cannot return while this thread has the lock, so the awaited event is not
        // freed.
        std::lock_guard lock(mutex_);
        if (waiting_on_ != nullptr) waiting_on_->wake();
    }
    close();
}

void Stream::join() {
    std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
}

void Stream::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        wakeup_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        auto work = std::move(queue_.front());
        queue_.pop_front();
        busy_ = true;
        lock.unlock();
        work(stop_);
        work = nullptr;  // freed outside the lock
        lock.lock();
        busy_ = false;
    }
}

}  // namespace aiokv
