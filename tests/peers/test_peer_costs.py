"""Costs of a ticket: they do not depend on the number of other tickets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.peers import acceptance, arrivals, assembly, deferred, incoming, receiver, ring

from .world import EQUAL, SPLIT, World

if TYPE_CHECKING:
    from collections.abc import Callable


FILES = {m.__file__ for m in (acceptance, arrivals, assembly, deferred, incoming, receiver, ring)}


def finish(world: World) -> None:
    """Run until nothing is left to do, without the checks of all tickets."""
    while world.step():
        pass


def lines_of_receiver(action: Callable[[], object]) -> int:
    """Return how many lines of the receiver and of its parts an action executes."""
    lines = 0

    def on_event(frame: Any, event: str, arg: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        lines += 1
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("mapping", [EQUAL, SPLIT])
@pytest.mark.parametrize("sends_first", [False, True])
def test_a_ticket_costs_the_same_beside_a_thousand_others(mapping, sends_first):
    def lines(others: int) -> int:
        world = World(1, senders=1 if mapping is EQUAL else 2, mapping=mapping, landing=8)
        for _ in range(others):
            world.receive(world.expect(2), [0])
        world.random.seed(2)  # the same order of events
        ticket = world.expect(2)

        def receive() -> None:
            transfer_id = world.receive(ticket, [0, 1])
            finish(world)
            assert world.reports[transfer_id] == (2, None)

        def move() -> None:
            for sender in world.senders:
                world.open(sender, ticket)
            finish(world)
            if not sends_first:
                world.receive(ticket, [0, 1])
            for sender in world.senders:
                world.send(sender, ticket, range(2 if mapping is EQUAL else 4))
            finish(world)
            if sends_first:
                receive()
            world.receiver.logic.close_ticket(ticket.ticket_id, "closed")
            finish(world)

        return lines_of_receiver(move)

    assert lines(1000) == lines(0)
