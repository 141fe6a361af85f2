"""Priority first, then arrival; leaving costs nobody their place."""

from __future__ import annotations

from aiokv.scheduler.admission import Admission


def served(line: Admission[str]) -> list[str]:
    order = []
    while (waiter := line.first()) is not None:
        order.append(waiter)
        line.drop_first()
    return order


def test_lower_priority_number_first_then_arrival():
    line: Admission[str] = Admission()
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)]:
        line.push(name, priority)
    assert line.in_order() == ["e", "b", "d", "a", "c"]
    assert served(line) == ["e", "b", "d", "a", "c"]
    assert len(line) == 0


def test_those_who_leave_are_skipped():
    line: Admission[int] = Admission()
    tickets = [line.push(number, 0) for number in range(1000)]
    for ticket in tickets[::2]:
        line.leave(ticket)
        line.leave(ticket)  # idempotent
    assert len(line) == 500
    assert served(line) == list(range(1, 1000, 2))


def test_first_of_an_empty_line():
    assert Admission().first() is None
