// Turn: which thread may run the code of an event loop. The loop's thread has the turn, except
// while it waits for events: then another thread may borrow it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

namespace aiokv {

class Turn {
  public:
    // Loop's thread: let others borrow the turn, until `reclaim`.
    void offer() {
        const std::lock_guard lock(mutex_);
        offered_ = true;
        was_borrowed_ = false;
    }

    // Loop's thread: let no other thread borrow the turn. Returns true if a borrower has it now.
    bool demand() {
        const std::lock_guard lock(mutex_);
        wanted_ = true;
        return borrower_ != std::thread::id{};
    }

    // Loop's thread, after `demand`: wait for the borrower.
    void wait_for_borrower() {
        std::unique_lock lock(mutex_);
        returned_.wait(lock, [this] { return borrower_ == std::thread::id{}; });
    }

    // Loop's thread: end the offer. Returns true if others have had the turn.
    bool end_offer() {
        const std::lock_guard lock(mutex_);
        offered_ = wanted_ = false;
        return was_borrowed_;
    }

    // Any thread: let no thread borrow the turn before the loop has had it.
    void want() {
        const std::lock_guard lock(mutex_);
        wanted_ = true;
    }

    // Any thread but the loop's: take the turn if it is free; never waits.
    bool try_borrow() {
        const std::lock_guard lock(mutex_);
        if (!offered_ || wanted_ || borrower_ != std::thread::id{}) {
            return false;
        }
        borrower_ = std::this_thread::get_id();
        was_borrowed_ = true;
        return true;
    }

    // Give the turn back if this thread has borrowed it.
    void give_back() {
        {
            const std::lock_guard lock(mutex_);
            if (borrower_ != std::this_thread::get_id()) {
                return;
            }
            borrower_ = {};
        }
        returned_.notify_one();
    }

    bool offered() const {
        const std::lock_guard lock(mutex_);
        return offered_;
    }

  private:
    mutable std::mutex mutex_;
    std::condition_variable returned_;
    bool offered_ = false;
    bool wanted_ = false;
    bool was_borrowed_ = false;
    std::thread::id borrower_;  // the default value: no thread
};

}  // namespace aiokv
