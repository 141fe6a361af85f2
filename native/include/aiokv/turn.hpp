// Turn: which thread may run the code of an event loop. The loop's thread has the turn, except
// while it waits for events: then another thread may borrow it.
#pragma once

#include <condition_variable>
#include <mutex>

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
        return is_borrowed_;
    }

    // Loop's thread, after `demand`: wait for the borrower.
    void wait_for_borrower() {
        std::unique_lock lock(mutex_);
        returned_.wait(lock, [this] { return !is_borrowed_; });
    }

    // Loop's thread: end the offer. Returns true if others have had the turn.
    bool end_offer() {
        const std::lock_guard lock(mutex_);
        offered_ = wanted_ = false;
        return was_borrowed_;
    }

    // Any thread but the loop's: take the turn if it is free; never waits.
    bool try_borrow() {
        const std::lock_guard lock(mutex_);
        if (!offered_ || wanted_ || is_borrowed_) {
            return false;
        }
        is_borrowed_ = was_borrowed_ = true;
        return true;
    }

    // After try_borrow() was true, in the same thread.
    void give_back() {
        {
            const std::lock_guard lock(mutex_);
            is_borrowed_ = false;
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
    bool is_borrowed_ = false;
    bool was_borrowed_ = false;
};

}  // namespace aiokv
