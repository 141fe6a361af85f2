"""Ctrl-C at any line of a callback: each plan of peers is reported once, with right bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import PeerError
from aiokv.peers.ticket import encode
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.integration.test_interrupts import LOOPS, Interrupter, run

from .workers import KEY, PeerWorker

if TYPE_CHECKING:
    from types import FrameType

    from tests.integration.test_interrupts import LoopFactory

RUNS = 15  # of the lines of callbacks, evenly spread
SECONDS = 0.2  # of a ticket: what an interrupt has stopped ends then


async def move(p: PeerWorker, d: PeerWorker, *, must_succeed: bool) -> None:
    """Move 6 blocks through 2 slots, and check the bytes of what is reported."""
    ticket = d.expect(6, seconds=PATIENCE_SECONDS if must_succeed else SECONDS)
    first, second = d.receive(ticket, [0, 1, 2], [5, 9, 2]), d.receive(ticket, [3, 4, 5], [1, 0, 7])
    try:
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
    except PeerError:
        assert not must_succeed
    sent = p.send(ticket, range(6), [11, 12, 13, 14, 15, 16])
    received = await d.ended(first, second)
    outcomes = [*received, *await p.ended(sent)]
    if must_succeed:
        assert outcomes == [("done", 0)] * 3
    for (outcome, bad), here, there in zip(
        received, ([5, 9, 2], [1, 0, 7]), ([11, 12, 13], [14, 15, 16]), strict=True
    ):
        good = 3 if outcome == "done" else bad
        assert d.blocks(here[:good]) == p.blocks(there[:good])
    for worker in (p, d):
        worker.controller.tickets.close_ticket(ticket.ticket_id, "closed")


async def exchange(interrupter: Interrupter, at: int) -> None:
    """Move blocks; after the interrupt, the tickets work again."""
    async with PeerWorker(seed=1, slots=4) as p, PeerWorker(seed=2, slots=4) as d:
        p.checks = d.checks = not at
        for _ in range(3):
            must_succeed = not at or interrupter.lines >= at
            await move(p, d, must_succeed=must_succeed)
            await spin(20)  # both sides note the end of a connection


class EndInterrupter(Interrupter):
    """As Interrupter, in the methods only that end a plan of peers."""

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        inside = frame.f_code.co_filename.endswith("peers/peer_plans.py")
        if not inside or frame.f_code.co_name not in ("end", "_finish"):
            return None
        return super()._on_call(frame, event, arg)


def play(new_loop: LoopFactory, interrupter: Interrupter, at: int) -> None:
    """Exchange blocks with an interrupt at the line ``at``; 0 for none."""
    loop = new_loop()
    loop.set_exception_handler(lambda _, context: None)
    with interrupter:
        interrupts = run(loop, exchange(interrupter, at))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert interrupts <= 1


# An interrupt may come between the call of a coroutine function and the task that runs it.
@pytest.mark.filterwarnings("ignore:.*PeerTransfers._write")
@LOOPS
def test_an_interrupt_at_any_line_of_a_callback_loses_no_plan(new_loop: LoopFactory) -> None:
    counter = Interrupter()
    play(new_loop, counter, 0)
    assert counter.lines > RUNS
    for at in range(1, counter.lines, max(counter.lines // RUNS, 1)):
        try:
            play(new_loop, Interrupter(at), at)
        except BaseException as error:
            raise AssertionError(f"interrupted at line {at}") from error


@pytest.mark.filterwarnings("ignore:.*PeerTransfers._write")
@LOOPS
def test_an_interrupt_at_the_end_of_a_plan_loses_no_report(new_loop: LoopFactory) -> None:
    counter = EndInterrupter()
    play(new_loop, counter, 0)
    lines = counter.lines // 3  # of the first of three exchanges
    assert lines > 30
    for at in range(1, lines):
        try:
            play(new_loop, EndInterrupter(at), at)
        except BaseException as error:
            raise AssertionError(f"interrupted at line {at}") from error
