"""Priority first, then arrival; leaving costs nobody their place."""

from __future__ import annotations

import random

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


def test_the_order_outlives_the_leaving_of_most():
    rng = random.Random(3)
    line: Admission[tuple[int, int]] = Admission()
    tickets = {}
    for number in range(400):
        waiter = (rng.randrange(50), number)
        tickets[line.push(waiter, waiter[0])] = waiter
    for ticket in rng.sample(sorted(tickets), 340):
        line.leave(ticket)
        del tickets[ticket]
    expected = sorted(tickets.values())
    assert line.in_order() == expected
    assert served(line) == expected


def test_first_of_an_empty_line():
    assert Admission().first() is None
