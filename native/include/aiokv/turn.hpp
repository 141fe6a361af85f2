// Turn: which thread may run the code of an event loop. The loop's thread has the turn, except
// while it waits for events: then another thread may borrow it.
#pragma once

#include <sys/socket.h>

#include <condition_variable>
#include <mutex>
#include <utility>

namespace aiokv {

class Turn {
  public:
    // `wake_socket`: a byte that is sent to it ends the loop's wait. -1 until the loop is made.
    void set_wake_socket(int wake_socket) { wake_socket_ = wake_socket; }

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
        bool wakes = false;
        {
            const std::lock_guard lock(mutex_);
            is_borrowed_ = false;
            wakes = std::exchange(wakes_, false);
        }
        returned_.notify_one();
        if (wakes) {
            send_wake();
        }
    }

    // End the loop's wait, if it waits: once the turn is given back, if it is borrowed, because the
    // loop could not run before.
    void wake() {
        {
            const std::lock_guard lock(mutex_);
            if (!offered_) {
                return;
            }
            if (is_borrowed_) {
                wakes_ = true;
                return;
            }
        }
        send_wake();
    }

  private:
    void send_wake() const {
        // A full buffer wakes the loop, too.
        static_cast<void>(::send(wake_socket_, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL));
    }

    int wake_socket_ = -1;
    std::mutex mutex_;
    std::condition_variable returned_;
    bool wakes_ = false;
    bool offered_ = false;
    bool wanted_ = false;
    bool is_borrowed_ = false;
    bool was_borrowed_ = false;
};

}  // namespace aiokv
