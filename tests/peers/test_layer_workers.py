"""Plans that send layers of blocks, between workers, over TCP and over a one-sided transport."""

from __future__ import annotations

import ctypes
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.base.plan import SEND
from aiokv.peers import peer_transfers
from aiokv.peers.one_sided import OneSidedTransport
from aiokv.peers.ticket import encode
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin

from .one_sided_fakes import FakeBackend
from .workers import KEY, PeerWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiokv.peers.one_sided import WritePiece
    from aiokv.peers.ticket import Ticket

pytestmark = pytest.mark.asyncio

PROMPT, SOURCES, TARGETS = range(4), range(8, 12), range(4)


@pytest.fixture(params=["tcp", "one-sided"])
def backends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Return the libraries of the workers of a test; empty with TCP."""
    made: list[FakeBackend] = []

    def make_transport(peers: object) -> OneSidedTransport:
        made.append(FakeBackend())
        return OneSidedTransport(made[-1])

    if request.param == "one-sided":
        monkeypatch.setattr(peer_transfers, "make_transport", make_transport)
    return made


@asynccontextmanager
async def workers(
    backends: list[FakeBackend], **options: Any
) -> AsyncIterator[tuple[PeerWorker, PeerWorker, Ticket]]:
    """Open two workers, and a ticket of the second one at the first one."""
    sizes: dict[str, Any] = {"layers": 5, "layer_ranges": 3}
    async with PeerWorker(seed=1, **sizes, **options) as p, PeerWorker(seed=2, **sizes) as d:
        transport = "nixl" if backends else "tcp"
        ticket = d.expect(len(PROMPT), transport=transport)
        await p.controller.tickets.open_ticket(encode(ticket, KEY))
        yield p, d, ticket
        for backend in backends:
            backend.open_gates()


def fragments(d: PeerWorker) -> int:
    return d.controller.tickets.statistics()[0].received.fragments


async def test_ranges_of_layers_become_blocks(backends):
    async with workers(backends) as (p, d, ticket):
        received = d.receive(ticket, PROMPT, TARGETS)
        for ranges in ((2, 3), (0, 1), (1, 2)):
            assert d.outcome(received) is None
            sent = p.send(ticket, PROMPT, SOURCES, ranges=ranges)
            assert await p.ended(sent) == [("done", 0)]
        assert await d.ended(received) == [("done", 0)]
        assert d.blocks(TARGETS) == p.blocks(SOURCES)
        assert fragments(d) == 3 * len(PROMPT)


async def test_layers_that_arrive_before_their_plan_wait_in_the_ring(backends):
    async with workers(backends) as (p, d, ticket):
        sent = [p.send(ticket, PROMPT, SOURCES, ranges=(i, i + 1)) for i in range(3)]
        await run_until_idle(lambda: fragments(d) == 4)  # half of the slots
        await spin(20)
        assert fragments(d) == 4
        received = d.receive(ticket, PROMPT, TARGETS)
        assert await d.ended(received) == [("done", 0)]
        for transfer_id in sent:
            assert await p.ended(transfer_id) == [("done", 0)]
        assert d.blocks(TARGETS) == p.blocks(SOURCES)


async def test_layers_with_wrong_bytes_are_sent_again(backends):
    async with workers(backends) as (p, d, ticket):
        if not backends:
            pytest.skip("the test changes what a one-sided transport has written")

        def change_once(pieces: Sequence[WritePiece]) -> None:
            backends[0].after_write = lambda pieces: None
            ctypes.c_ubyte.from_address(pieces[0].target + 3).value ^= 1

        backends[0].after_write = change_once
        received = d.receive(ticket, PROMPT, TARGETS)
        p.send(ticket, PROMPT, SOURCES, ranges=(0, 3))
        assert await d.ended(received) == [("done", 0)]
        assert d.blocks(TARGETS) == p.blocks(SOURCES)
        assert d.controller.tickets.statistics()[0].received.wrong == 1


async def test_cancelled_plan_with_some_layers_leaves_its_blocks_alone(backends):
    """I11: layers that arrive after the report of their plan stay in their slots."""
    async with workers(backends) as (p, d, ticket):
        received = d.receive(ticket, PROMPT, TARGETS)
        assert await p.ended(p.send(ticket, PROMPT, SOURCES, ranges=(0, 2))) == [("done", 0)]
        d.controller.plans.cancel(received)
        assert await d.ended(received) == [("cancelled", 0)]
        before = d.blocks(TARGETS)
        p.send(ticket, PROMPT, SOURCES, ranges=(2, 3))
        await spin(50)
        assert d.blocks(TARGETS) == before
        d.controller.tickets.close_ticket(ticket.ticket_id, "the test ends")
        await run_until_idle(lambda: d.free_slots == 8)


@pytest.mark.parametrize("opens", ["mark", "step"])
async def test_early_plan_waits_for_its_mark_or_for_its_step(backends, opens):
    device = ManualDevice()
    async with workers(backends, device=device) as (p, d, ticket):
        d.receive(ticket, PROMPT, TARGETS)
        p.send(ticket, PROMPT[:2], SOURCES[:2], after_step=1, ranges=(0, 2), mark=5)
        p.controller.tickets.layers_done(ticket.ticket_id, 4, None)  # another mark
        p.controller.tickets.layers_done(bytes(16), 5, None)  # another ticket
        await spin(20)
        assert not device.copies_of(SEND)
        event = ManualEvent()
        if opens == "mark":
            p.controller.tickets.layers_done(ticket.ticket_id, 5, event)
        else:
            p.controller.steps.close(1, event)
        await run_until_idle(lambda: len(device.copies_of(SEND)) == 2)
        assert {copy.after for copy in device.copies_of(SEND)} == {event}
        assert {copy.group for copy in device.copies_of(SEND)} == {"attention 0:1", "attention 1:3"}
        event.complete()
        device.complete_all()


async def test_early_plan_with_the_last_layers_fails(backends):
    async with workers(backends) as (p, d, ticket):
        d.receive(ticket, PROMPT, TARGETS)
        for ranges in ((0, 3), (2, 3), (0, 0)):
            sent = p.send(ticket, PROMPT, SOURCES, ranges=ranges, mark=1)
            assert await p.ended(sent) == [("failed", 0)]
        sent = p.send(ticket, PROMPT, SOURCES, ranges=(1, 4))
        assert await p.ended(sent) == [("failed", 0)]
        assert fragments(d) == 0
