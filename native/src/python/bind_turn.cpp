// The turn of an event loop, which other threads borrow.
#include "aiokv/turn.hpp"

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {

void bind_turn(nb::module_& m) {
    nb::class_<Turn>(m, "Turn", "Which thread may run the code of an event loop.")
        .def(nb::init<>())
        .def("offer", &Turn::offer, "Loop's thread: let others borrow the turn until `reclaim`.")
        .def(
            "reclaim",
            [](Turn& turn) {
                if (turn.demand()) {  // otherwise it keeps the GIL
                    const nb::gil_scoped_release released;
                    turn.wait_for_borrower();
                }
                return turn.end_offer();
            },
            "Loop's thread: wait for a borrower, and end the offer. Return True if others have had "
            "the turn.")
        .def("set_wake_socket", &Turn::set_wake_socket, "wake_socket"_a,
             "Set the descriptor of the socket to which a byte is sent to wake the loop.")
        .def("wake", &Turn::wake,
             "End the loop's wait for events, if it waits; at the end of a `call` that runs.")
        .def(
            "call",
            [](Turn& turn, const nb::object& function, const nb::args& args) -> nb::object {
                if (!turn.try_borrow()) return nb::bool_(false);
                // Native code, because no interrupt can come between the loan and its end.
                struct Loan {
                    Turn& turn;
                    ~Loan() { turn.give_back(); }
                } const loan{turn};
                return function(*args);
            },
            "function"_a, "args"_a,
            nb::sig("def call(self, function: object, *args: object) -> bool"),
            "Call a function with the turn and return its value, if the loop waits for events and "
            "no other thread has the turn; return False otherwise. Does not wait.");
}

}  // namespace aiokv
