"""Two workers over a one-sided transport of the test: wrong bytes, late writes, lost peers."""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError, PeerError
from aiokv.peers import accepted, peer_transfers
from aiokv.peers.messages import Want
from aiokv.peers.one_sided import EndpointError, OneSidedTransport
from aiokv.peers.ticket import encode
from aiokv.testing import run_until_idle, spin

from .one_sided_fakes import MISSING, FakeBackend
from .workers import KEY, PeerWorker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiokv.peers.one_sided import WritePiece

pytestmark = pytest.mark.asyncio


class Workers:
    """A sending and a receiving worker with their libraries."""

    def __init__(self, p: PeerWorker, d: PeerWorker, backends: list[FakeBackend]) -> None:
        self.p, self.d = p, d
        self.sending, self.receiving = backends

    async def begin(self, num_blocks: int = 4) -> tuple[int, int, bytes]:
        """Begin to send blocks 8 and on to blocks 0 and on; return both plans and the ticket."""
        ticket = self.d.expect(num_blocks, transport="nixl")
        received = self.d.receive(ticket, range(num_blocks), range(num_blocks))
        await self.p.controller.tickets.open_ticket(encode(ticket, KEY))
        sent = self.p.send(ticket, range(num_blocks), range(8, 8 + num_blocks))
        return received, sent, ticket.ticket_id

    def lose(self) -> None:
        """Cut all connections, as after silence: the receiver closes, the sender does not know."""
        peers: Any = self.d.controller.tickets
        for connection in peers._accepted.connections:
            connection.abort("the peer sent nothing for 6.0 s")


@asynccontextmanager
async def workers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    backends: list[FakeBackend] = []

    def make_transport(peers: object) -> OneSidedTransport:
        backends.append(FakeBackend())
        return OneSidedTransport(backends[-1])

    monkeypatch.setattr(peer_transfers, "make_transport", make_transport)
    async with PeerWorker(seed=1) as p, PeerWorker(seed=2) as d:
        both = Workers(p, d, backends)
        try:
            yield both
        finally:
            for backend in backends:
                backend.open_gates()
    assert all(endpoint.is_closed for backend in backends for endpoint in backend.endpoints)


async def test_blocks_arrive_with_equal_bytes(monkeypatch):
    async with workers(monkeypatch) as w:
        received, sent, _ = await w.begin(6)
        assert await w.p.ended(sent) == [("done", 0)]
        assert await w.d.ended(received) == [("done", 0)]
        assert w.d.blocks(range(6)) == w.p.blocks(range(8, 14))


async def test_bytes_that_change_on_the_way_are_sent_again(monkeypatch):
    async with workers(monkeypatch) as w:

        def change_once(pieces: Sequence[WritePiece]) -> None:
            w.sending.after_write = lambda pieces: None
            byte = ctypes.c_ubyte.from_address(pieces[0].target + 3)
            byte.value ^= 1

        w.sending.after_write = change_once
        received, sent, _ = await w.begin()
        assert await w.p.ended(sent) == [("done", 0)]
        assert await w.d.ended(received) == [("done", 0)]
        assert w.d.blocks(range(4)) == w.p.blocks(range(8, 12))
        assert w.d.controller.tickets.statistics()[0].received.wrong == 1
        assert w.p.controller.tickets.statistics()[0].sent.retries == 1


async def test_bytes_that_always_change_never_reach_a_block(monkeypatch):
    async with workers(monkeypatch) as w:
        before = w.d.blocks(range(4))

        def change(pieces: Sequence[WritePiece]) -> None:
            for piece in pieces:
                ctypes.c_ubyte.from_address(piece.target).value ^= 1

        w.sending.after_write = change
        received, sent, _ = await w.begin()
        assert await w.d.ended(received) == [("failed", 0)]
        assert await w.p.ended(sent) == [("failed", 0)]
        assert w.d.blocks(range(4)) == before
        await run_until_idle(lambda: w.d.free_slots == 8)


async def test_late_write_reaches_only_quarantined_slots(monkeypatch):
    """I11: the connection was lost while a write had begun; another sender uses the ring."""
    async with workers(monkeypatch) as w:
        before = w.d.blocks(range(4))
        w.sending.writing.shut()
        received, sent, _ = await w.begin()
        await run_until_idle(w.sending.writing.reached.is_set)
        w.lose()
        assert await w.d.ended(received) == [("failed", 0)]
        await run_until_idle(lambda: w.p.outcome(sent) is not None)
        await spin(50)
        assert w.d.free_slots < 8  # the sender may still write them
        assert w.d.controller.tickets.violations() == []
        # The other slots serve a new connection meanwhile.
        w.sending.writing.open()
        await run_until_idle(lambda: w.d.free_slots == 8)
        assert w.d.blocks(range(4)) == before
        again, sent, _ = await w.begin()
        assert await w.d.ended(again) == [("done", 0)]
        assert await w.p.ended(sent) == [("done", 0)]
        assert w.d.blocks(range(4)) == w.p.blocks(range(8, 12))


async def test_outgoing_slots_are_in_use_until_the_library_has_ended(monkeypatch):
    async with workers(monkeypatch) as w:
        w.sending.writing.shut()
        _, sent, _ = await w.begin()
        await run_until_idle(w.sending.writing.reached.is_set)
        w.lose()
        assert await w.p.ended(sent) == [("failed", 0)]  # the device blocks are free, not the slots
        sender: Any = w.p.controller.tickets._sender
        await spin(50)
        assert sender.free_slots == 4
        w.sending.writing.open()
        await run_until_idle(lambda: sender.free_slots == 8)


async def test_failed_write_ends_the_connection_and_the_next_ticket_makes_a_new_one(monkeypatch):
    async with workers(monkeypatch) as w:
        w.sending.failures["write"] = EndpointError("the device was removed")
        received, sent, _ = await w.begin()
        assert await w.d.ended(received) == [("failed", 0)]
        assert await w.p.ended(sent) == [("failed", 0)]
        assert any("the device was removed" in report.reason for report in w.p.reports)
        await run_until_idle(lambda: w.d.free_slots == 8)
        again, sent, _ = await w.begin()
        assert await w.d.ended(again) == [("done", 0)]
        assert await w.p.ended(sent) == [("done", 0)]


async def test_unexpected_error_of_the_library_ends_the_connection_and_reaches_the_loop(
    monkeypatch,
):
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with workers(monkeypatch) as w:
        broken = RuntimeError("incompatible function arguments")
        w.sending.failures["write"] = broken
        received, sent, _ = await w.begin()
        assert await w.d.ended(received) == [("failed", 0)]  # long before the deadline
        assert await w.p.ended(sent) == [("failed", 0)]
        assert [context["exception"] for context in errors] == [broken]
        await run_until_idle(lambda: w.d.free_slots == 8)


async def test_unexpected_error_of_the_receivers_library_cuts_the_connection(monkeypatch):
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with workers(monkeypatch) as w:
        broken = RuntimeError("incompatible function arguments")

        async def accept(connection: object, metadata: bytes) -> bytes:
            raise broken

        monkeypatch.setattr(w.d.controller.tickets._transport, "accept", accept)
        with pytest.raises(PeerError, match="the connection to the receiver ended"):
            await w.begin()
        assert [context["exception"] for context in errors] == [broken]
        w.d.controller.tickets.give_up("the test ended")


async def test_tickets_that_are_opened_at_the_same_time_share_one_endpoint(monkeypatch):
    async with workers(monkeypatch) as w:
        tickets = [w.d.expect(2, transport="nixl") for _ in range(3)]
        blobs = [encode(ticket, KEY) for ticket in tickets]
        await asyncio.gather(*map(w.p.controller.tickets.open_ticket, blobs))
        assert [endpoint.receives for endpoint in w.sending.endpoints].count(False) == 1
        for worker in (w.p, w.d):
            worker.controller.tickets.give_up("the test ended")


async def test_connection_that_ends_while_its_endpoint_is_made_leaves_nothing(monkeypatch):
    async with workers(monkeypatch) as w:
        received, sent, _ = await w.begin()  # uses the endpoint that was made at the start
        await w.p.ended(sent)
        await w.d.ended(received)
        w.lose()
        await run_until_idle(lambda: w.p.controller.tickets.statistics()[0].connections == 0)
        w.sending.creating.shut()
        ticket = w.d.expect(2, transport="nixl")
        opening = asyncio.ensure_future(w.p.controller.tickets.open_ticket(encode(ticket, KEY)))
        await run_until_idle(w.sending.creating.reached.is_set)
        w.lose()
        await run_until_idle(lambda: w.p.controller.tickets.statistics()[0].connections == 0)
        w.sending.creating.open()
        with pytest.raises(PeerError, match="the connection to the receiver ended"):
            await opening
        opener: Any = w.p.controller.tickets._opener
        assert not opener._links
        assert not opener._linking
        w.d.controller.tickets.give_up("the test ended")


@pytest.mark.parametrize("side", ["sending", "receiving"])
async def test_endpoint_that_cannot_be_made_fails_the_ticket(side, monkeypatch):
    async with workers(monkeypatch) as w:
        received, sent, _ = await w.begin()  # uses the endpoints that were made at the start
        await w.p.ended(sent)
        await w.d.ended(received)
        w.lose()
        await run_until_idle(lambda: w.d.controller.tickets.statistics()[0].connections == 0)
        await run_until_idle(lambda: w.p.controller.tickets.statistics()[0].connections == 0)
        getattr(w, side).failures["create"] = EndpointError("no memory is left")
        with pytest.raises(PeerError, match="no memory is left"):
            await w.begin()
        for worker in (w.p, w.d):
            assert worker.controller.tickets.violations() == []
        w.d.controller.tickets.give_up("the test ended")


async def test_worker_sleeps_and_wakes_up_with_new_endpoints(monkeypatch):
    async with workers(monkeypatch) as w:
        received, sent, _ = await w.begin()
        await w.p.ended(sent)
        await w.d.ended(received)
        for worker in (w.p, w.d):
            await worker.controller.tickets.sleep()
        assert all(endpoint.is_closed for endpoint in w.sending.endpoints + w.receiving.endpoints)
        for worker in (w.p, w.d):
            await worker.controller.tickets.wake_up()
        received, sent, _ = await w.begin()
        assert await w.p.ended(sent) == [("done", 0)]
        assert await w.d.ended(received) == [("done", 0)]


async def test_transport_that_cannot_start_fails_the_opening(monkeypatch):
    backend = FakeBackend()
    backend.failures["load"] = MISSING
    monkeypatch.setattr(peer_transfers, "make_transport", lambda peers: OneSidedTransport(backend))
    worker = PeerWorker()
    with pytest.raises(ConfigError, match="the package is missing"):
        await worker.__aenter__()
    await worker.controller.aclose()
    worker.poller.close()
    await spin(2)


async def test_messages_of_a_sender_that_is_not_accepted_yet_are_limited(monkeypatch):
    monkeypatch.setattr(accepted, "MAX_WAITING", 3)
    async with workers(monkeypatch) as w:
        received, sent, _ = await w.begin()  # uses the endpoint that was made at the start
        await w.p.ended(sent)
        await w.d.ended(received)
        w.lose()
        await run_until_idle(lambda: w.p.controller.tickets.statistics()[0].connections == 0)
        w.receiving.creating.shut()
        ticket = w.d.expect(2, transport="nixl")
        opening = asyncio.ensure_future(w.p.controller.tickets.open_ticket(encode(ticket, KEY)))
        await run_until_idle(w.receiving.creating.reached.is_set)
        opener: Any = w.p.controller.tickets._opener
        ((connection, _),) = opener._replies
        for _ in range(2):
            connection.send(Want(ticket_id=ticket.ticket_id, fragments=1))
        await spin(50)
        assert not connection.reason
        connection.send(Want(ticket_id=ticket.ticket_id, fragments=1))
        with pytest.raises(PeerError, match="the connection to the receiver ended"):
            await opening
        w.receiving.open_gates()
        w.d.controller.tickets.give_up("the test ended")
