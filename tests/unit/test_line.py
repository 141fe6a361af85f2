"""PriorityLine: priority first, then arrival; removing a waiter keeps the order of others."""

from __future__ import annotations

import weakref
from itertools import count
from random import Random
from typing import TYPE_CHECKING, TypeVar

import pytest

from aiokv.scheduler.line import PriorityLine

if TYPE_CHECKING:
    from aiokv.scheduler.line import Ticket

W = TypeVar("W")


def served(line: PriorityLine[W], tickets: dict[W, Ticket]) -> list[W]:
    """Let the first waiter leave until the line is empty; return the waiters in this order."""
    order = []
    while (waiter := line.first()) is not None:
        order.append(waiter)
        line.leave(tickets[waiter])
    return order


def test_lower_priority_number_first_then_arrival():
    line: PriorityLine[str] = PriorityLine()
    priorities = {"a": 1, "b": 0, "c": 1, "d": 0, "e": -1}
    tickets = {name: line.push(name, priority) for name, priority in priorities.items()}
    assert line.in_order() == ["e", "b", "d", "a", "c"]
    assert served(line, tickets) == ["e", "b", "d", "a", "c"]
    assert len(line) == 0


def test_removed_waiters_are_skipped():
    line: PriorityLine[int] = PriorityLine()
    tickets = [line.push(number, 0) for number in range(1000)]
    for ticket in tickets[::2]:
        line.leave(ticket)
        line.leave(ticket)  # idempotent
    assert len(line) == 500
    assert served(line, dict(enumerate(tickets))) == list(range(1, 1000, 2))


def test_order_holds_after_most_waiters_were_removed():
    rng = Random(3)
    line: PriorityLine[tuple[int, int]] = PriorityLine()
    tickets = {}
    for number in range(400):
        waiter = (rng.randrange(50), number)
        tickets[line.push(waiter, waiter[0])] = waiter
    for ticket in rng.sample(sorted(tickets), 340):
        line.leave(ticket)
        del tickets[ticket]
    expected = sorted(tickets.values())
    assert line.in_order() == expected
    by_waiter = {waiter: ticket for ticket, waiter in tickets.items()}
    assert served(line, by_waiter) == expected


def test_first_of_an_empty_line_is_none():
    assert PriorityLine().first() is None


@pytest.mark.parametrize("seed", range(20))
def test_random_entries_and_departures_keep_the_order(seed: int):
    """Compare with a sorted list; the line keeps no reference to a removed waiter."""
    random = Random(seed)
    line: PriorityLine[str] = PriorityLine()
    model: list[tuple[int, int, str]] = []
    for step in range(400):
        if random.random() < 0.55:
            priority = random.randint(-3, 3)
            ticket = line.push(f"w{step}", priority)
            model.append((priority, ticket, f"w{step}"))
        elif model and random.random() < 0.7:
            gone = model.pop(random.randrange(len(model)))
            line.leave(gone[1])
            line.leave(gone[1])
        elif model:
            first = model.pop(0)
            assert line.first() == first[2]
            line.leave(first[1])
        model.sort()
        assert line.check() == []
        assert line.in_order() == [name for *_, name in model]
        assert line.first() == (model[0][2] if model else None)


def test_waiter_that_left_is_not_referenced():
    class Waiter:
        pass

    line: PriorityLine[Waiter] = PriorityLine()
    waiters = [Waiter() for _ in range(20)]
    tickets = [line.push(waiter, 0) for waiter in waiters]
    gone = weakref.ref(waiters[7])
    line.leave(tickets[7])
    waiters[7] = Waiter()
    assert gone() is None


def test_check_sees_entries_out_of_order():
    line: PriorityLine[str] = PriorityLine()
    for priority in (1, 2, 3):
        line.push("w", priority)
    line._heap[0], line._heap[1] = line._heap[1], line._heap[0]
    assert line.check() == [
        "line: 3 entries, 3 places differ",
        "line: entry 1 is in front of its parent",
    ]


def test_waiter_that_took_its_place_before_enters_at_that_place():
    rng = Random(7)
    sequence = count()
    places: PriorityLine[int] = PriorityLine(sequence)
    line: PriorityLine[int] = PriorityLine(sequence)
    tickets: dict[int, Ticket] = {}
    reserved: dict[int, Ticket] = {}
    for number in range(2000):
        if rng.random() < 0.4:
            reserved[number] = places.push(number, rng.randrange(3))
        else:
            tickets[number] = line.push(number, rng.randrange(3))
        if reserved and rng.random() < 0.4:
            late = rng.choice(sorted(reserved))
            places.leave(reserved[late])
            tickets[late] = reserved.pop(late)
            line.insert(late, tickets[late])
        if tickets and rng.random() < 0.5:
            gone = rng.choice([line.first(), rng.choice(sorted(tickets))])
            assert gone is not None
            line.leave(tickets.pop(gone))
        expected = sorted(tickets, key=tickets.__getitem__)
        assert line.first() == (expected[0] if expected else None)
        assert len(line) == len(expected)
        assert line.check() == []
        if number % 50 == 0:
            assert line.in_order() == expected
    assert served(line, tickets) == expected
