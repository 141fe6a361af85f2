// The turn of an event loop, which other threads borrow.
#include "aiokv/turn.hpp"

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {

void bind_turn(nb::module_& m) {
    // A context manager of native code, because no interrupt can come between its `__enter__` and
    // the block, nor before its `__exit__`.
    nb::class_<Turn>(m, "Turn",
                     "Which thread may run the code of an event loop. `with turn as is_mine` "
                     "borrows it if the loop waits for events, and does not wait.")
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
        .def("want", &Turn::want, "Let no thread borrow the turn before the loop has had it.")
        .def_prop_ro("offered", &Turn::offered, "True while the loop waits for events.")
        .def("__enter__", &Turn::try_borrow)
        .def(
            "__exit__",
            [](Turn& turn, const nb::object&, const nb::object&, const nb::object&) {
                turn.give_back();
            },
            "exc_type"_a.none(), "exc"_a.none(), "traceback"_a.none());
}

}  // namespace aiokv
