"""OneSidedTransport over a library of the test: no access to memory that was given back."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import ConfigError, InternalError, PeerError
from aiokv.peers import one_sided
from aiokv.peers.messages import Return, SlotCredit
from aiokv.peers.one_sided import EndpointError, OneSidedTransport
from aiokv.peers.tcp import TcpTransport
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from tests.harness.leftovers import running_threads
from tests.peers.one_sided_fakes import MISSING, FakeBackend
from tests.peers.wires import connected, landed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.peers.wires import Pair

SLOT_BYTES = 1 << 20
BATCH = one_sided.WRITE_BYTES // SLOT_BYTES  # fragments of one call of the library

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = running_threads()
    yield
    patient_until = time.monotonic() + PATIENCE_SECONDS
    while (left := running_threads() - before) and time.monotonic() < patient_until:
        time.sleep(0)
    assert not left


def memory(num_slots: int) -> PeerMemory:
    blocks = np.zeros((num_slots, SLOT_BYTES), np.uint8)
    return PeerMemory(
        address=blocks.ctypes.data,
        num_slots=num_slots,
        slot_bytes=SLOT_BYTES,
        view=blocks.reshape(-1).data,
    )


class Sides:
    """A sender and a receiver, joined by a connection and by the library."""

    def __init__(self, pair: Pair, is_reused: bool, machine: str) -> None:
        self.pair = pair
        self.backends = FakeBackend(is_reused=is_reused), FakeBackend(is_reused=is_reused)
        self.sender = OneSidedTransport(self.backends[0], machine)
        self.receiver = OneSidedTransport(self.backends[1], "here")
        self.outgoing, self.landing = memory(12), memory(12)
        for slot in range(12):
            self.outgoing.slot(slot, SLOT_BYTES)[:] = bytes([slot + 1]) * SLOT_BYTES

    async def open(self) -> None:
        await self.sender.open(memory(0), self.outgoing)
        await self.receiver.open(self.landing, memory(0))
        self.pair.start()
        metadata = await self.receiver.accept(self.pair.server, self.sender.metadata())
        self.link = await self.sender.connect(self.pair.client, metadata)

    def landed_slots(self) -> dict[int, int]:
        """Return the content of the landing slots that were written."""
        first = self.landing.view[::SLOT_BYTES].tolist()
        last = self.landing.view[SLOT_BYTES - 1 :: SLOT_BYTES].tolist()
        assert first == last
        return {slot: content for slot, content in enumerate(first) if content}

    async def close(self) -> None:
        for backend in self.backends:
            backend.open_gates()
        await self.sender.aclose()
        self.pair.client.abort("the test ended")
        await self.receiver.aclose()
        for backend in self.backends:
            await run_until_idle(lambda b=backend: all(e.is_closed for e in b.endpoints))


@asynccontextmanager
async def sides(*, is_reused: bool = False, machine: str = "here") -> AsyncIterator[Sides]:
    async with connected() as pair:
        both = Sides(pair, is_reused, machine)
        try:
            await both.open()
            yield both
        finally:
            await both.close()


def fragments(count: int, first: int = 0) -> list[Outgoing]:
    slots = range(first, first + count)
    return [Outgoing(slot, landed(SLOT_BYTES, slot=11 - slot, block=slot)) for slot in slots]


async def test_fragments_are_announced_when_they_are_in_their_slots():
    async with sides() as s:
        s.pair.at_server.at_message = lambda message: seen.append(
            s.landing.slot(message.slot, 1)[0]
        )
        seen: list[int] = []
        await s.link.write(fragments(12))
        await run_until_idle(lambda: len(seen) == 12)
        assert seen == list(range(1, 13))
        assert s.landed_slots() == {11 - slot: slot + 1 for slot in range(12)}
        assert s.backends[0].endpoints[0].connected_to == (b"fake", None)
        assert s.backends[0].endpoints[0].writes == 12 // BATCH


async def test_memory_of_a_gpu_is_named_to_the_sender():
    async with connected() as pair:
        s = Sides(pair, False, "here")
        s.landing = PeerMemory(address=4096, num_slots=1, slot_bytes=64, device=3)
        await s.open()
        assert s.backends[0].endpoints[0].connected_to == (b"fake", 3)
        await s.close()
    with pytest.raises(InternalError, match="memory of GPU 3"):
        s.landing.slot(0, 64)
    with pytest.raises(ConfigError, match="memory of a GPU"):
        await TcpTransport().open(s.landing, memory(1))


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_cancelled_write_returns_the_credits_of_what_has_not_begun(num_cancels):
    async with sides() as s:
        gate = s.backends[0].writing
        gate.shut()
        writing = asyncio.create_task(s.link.write(fragments(12)))
        await run_until_idle(gate.reached.is_set)
        for _ in range(num_cancels):
            writing.cancel()
            await spin(3)
            assert not writing.done()  # the library reads the slots
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await run_until_idle(lambda: len(s.pair.at_server.messages) == BATCH + 1)
        returned, *announced = s.pair.at_server.messages
        assert returned == Return(slots=[SlotCredit(11 - slot, 1) for slot in range(BATCH, 12)])
        assert [message.sender_block for message in announced] == list(range(BATCH))
        assert len(s.landed_slots()) == BATCH


async def test_failed_write_closes_its_endpoint_before_it_is_reported():
    async with sides() as s:
        s.backends[0].failures["write"] = EndpointError("the wire broke")
        s.backends[0].closing.shut()
        writing = asyncio.create_task(s.link.write(fragments(12)))
        await run_until_idle(s.backends[0].closing.reached.is_set)
        await spin(3)
        assert not writing.done()  # the library may read the slots
        s.backends[0].closing.open()
        with pytest.raises(PeerError, match="the wire broke"):
            await writing
        with pytest.raises(PeerError, match="ended"):
            await s.link.write(fragments(1))
        assert s.landed_slots() == {}
        assert s.pair.at_server.messages == []


async def test_write_whose_connection_ends_is_reported_when_the_library_has_ended():
    async with sides() as s:
        gate = s.backends[0].writing
        gate.shut()
        writing = asyncio.create_task(s.link.write(fragments(12)))
        await run_until_idle(gate.reached.is_set)
        s.pair.client.abort("the peer sent nothing for 6.0 s")
        await spin(10)
        assert not writing.done()
        gate.open()
        with pytest.raises(PeerError, match="the peer sent nothing for"):
            await writing
        assert len(s.landed_slots()) == BATCH  # what had begun
        await run_until_idle(lambda: s.backends[0].endpoints[0].is_closed)
        with pytest.raises(PeerError, match="the peer sent nothing for"):
            await s.link.write(fragments(1))


async def test_slots_are_fenced_only_when_the_late_write_has_ended():
    """I11: the receiver gave the connection up, and the sender writes on."""
    async with sides() as s:
        gate = s.backends[0].writing
        gate.shut()
        writing = asyncio.create_task(s.link.write(fragments(1)))
        await run_until_idle(gate.reached.is_set)
        s.pair.server.abort("the peer sent nothing for 6.0 s")
        fence = asyncio.create_task(s.receiver.fence(s.pair.server, may_write=True))
        await run_until_idle(lambda: bool(s.pair.client.reason))
        await spin(20)
        assert not fence.done()
        assert not s.backends[1].endpoints[0].is_closed
        gate.open()
        await fence
        assert s.landed_slots() == {11: 1}  # before the end of the fence, not later
        assert s.backends[0].endpoints[0].is_closed
        assert s.backends[1].endpoints[0].is_closed
        with pytest.raises(PeerError):
            await writing


async def test_fence_of_a_sender_on_another_machine_needs_only_the_endpoint():
    async with sides(machine="there") as s:
        s.pair.client.hold()  # it will not close its socket
        s.pair.server.abort("lost")
        await s.receiver.fence(s.pair.server, may_write=True)
        assert s.backends[1].endpoints[0].is_closed
        s.pair.client.unhold()


async def test_cancelled_fence_can_be_called_again():
    async with sides() as s:
        s.pair.client.hold()
        s.pair.server.abort("lost")
        fence = asyncio.create_task(s.receiver.fence(s.pair.server, may_write=True))
        await spin(5)
        fence.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fence
        s.pair.client.unhold()
        await s.receiver.fence(s.pair.server, may_write=True)
        await s.receiver.fence(s.pair.server, may_write=True)
        assert s.backends[1].endpoints[0].is_closed


@pytest.mark.parametrize("may_write", [False, True])
async def test_endpoint_without_writes_serves_the_next_connection(may_write):
    async with sides(is_reused=True) as s, connected() as second:
        s.pair.client.abort("done")
        s.pair.server.abort("done")
        await s.receiver.fence(s.pair.server, may_write=may_write)
        second.start()
        metadata = await s.receiver.accept(second.server, s.sender.metadata())
        link = await s.sender.connect(second.client, metadata)
        await link.write(fragments(1))
        assert s.landed_slots() == {11: 1}
        assert len(s.backends[0].endpoints) == 1
        assert len(s.backends[1].endpoints) == (2 if may_write else 1)
        await link.aclose()


@pytest.mark.parametrize("call", ["create", "connect"])
async def test_endpoint_that_cannot_be_made_is_a_peer_error(call):
    async with sides() as s, connected() as second:
        second.start()
        s.backends[0].failures[call] = EndpointError("no such device")
        metadata = await s.receiver.accept(second.server, s.sender.metadata())
        with pytest.raises(PeerError, match="no such device"):
            await s.sender.connect(second.client, metadata)
        s.backends[1].failures["create"] = EndpointError("no such device")
        async with connected() as third:
            with pytest.raises(PeerError, match="no such device"):
                await s.receiver.accept(third.server, s.sender.metadata())
            third.server.abort("refused")
            await s.receiver.fence(third.server, may_write=False)


async def test_endpoint_with_a_write_in_progress_is_not_kept():
    async with sides(is_reused=True) as s, connected() as second:
        gate = s.backends[0].writing
        gate.shut()
        writing = asyncio.create_task(s.link.write(fragments(1)))
        await run_until_idle(gate.reached.is_set)
        s.pair.client.abort("lost")
        await spin(10)
        second.start()
        metadata = await s.receiver.accept(second.server, s.sender.metadata())
        link = await s.sender.connect(second.client, metadata)
        gate.open()
        with pytest.raises(PeerError, match="lost"):
            await writing
        await run_until_idle(lambda: s.backends[0].endpoints[0].is_closed)
        await link.write(fragments(2))
        assert len(s.backends[0].endpoints) == 2


@pytest.mark.parametrize("metadata", [b"", b"\xc1", b"\x91\xa4here"])
async def test_malformed_metadata_is_a_peer_error(metadata):
    async with sides() as s, connected() as second:
        with pytest.raises(PeerError, match="malformed"):
            await s.sender.connect(second.client, metadata)
        if metadata != s.sender.metadata():
            with pytest.raises(PeerError, match="malformed"):
                await s.receiver.accept(second.server, metadata)


async def test_credit_outside_the_landing_slots_is_a_peer_error():
    async with sides() as s:
        with pytest.raises(PeerError, match="credit for slot 12"):
            await s.link.write([Outgoing(0, landed(SLOT_BYTES, slot=12))])
        with pytest.raises(InternalError, match="the memory has 12 slots"):
            await s.link.write([Outgoing(12, landed(SLOT_BYTES))])
        assert s.backends[0].endpoints[0].writes == 0


@pytest.mark.parametrize("call", ["load", "create"])
async def test_transport_that_cannot_start_is_a_config_error(call):
    backend = FakeBackend()
    backend.failures[call] = MISSING if call == "load" else EndpointError("too little memory")
    transport = OneSidedTransport(backend)
    with pytest.raises(ConfigError, match="missing" if call == "load" else "too little memory"):
        await transport.open(memory(1), memory(1))
    assert all(endpoint.is_closed for endpoint in backend.endpoints)


async def test_library_that_does_not_start_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(one_sided, "START_SECONDS", 0.01)
    monkeypatch.setattr(one_sided, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(one_sided, "_left_behind", [])
    backend = FakeBackend()
    backend.creating.shut()
    with pytest.raises(ConfigError, match=r"did not start within 0\.01 s"):
        await OneSidedTransport(backend).open(memory(1), memory(1))
    assert len(one_sided._left_behind) == 2
    backend.open_gates()
    await run_until_idle(lambda: all(endpoint.is_closed for endpoint in backend.endpoints))


@pytest.mark.parametrize("stuck", ["sender", "receiver", "peer"])
async def test_closing_leaves_behind_what_does_not_end(stuck, monkeypatch, caplog):
    monkeypatch.setattr(one_sided, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(one_sided, "_left_behind", [])
    async with sides() as s:
        transport = s.sender if stuck == "sender" else s.receiver
        s.backends[0 if stuck == "sender" else 1].closing.shut()
        if stuck == "peer":
            s.backends[1].open_gates()
            s.pair.client.hold()
        if stuck == "receiver":
            s.pair.client.abort("closed")
        await transport.aclose()
        assert "memory_left_behind" in caplog.text
        kept = s.outgoing if stuck == "sender" else s.landing
        assert any(memory is kept for memory in one_sided._left_behind)
        await transport.aclose()
        if stuck == "peer":
            s.pair.client.unhold()
        if stuck == "sender":
            assert not s.pair.server.reason  # nothing tells the receiver that no write can come
            s.backends[0].open_gates()
            await run_until_idle(lambda: s.backends[0].endpoints[0].is_closed)
        monkeypatch.undo()


async def test_closed_transport_can_be_opened_again():
    async with sides() as s, connected() as second:
        await s.link.write(fragments(1))
        s.pair.client.abort("the engine sleeps")
        await s.sender.aclose()
        await s.receiver.aclose()
        s.landing = memory(12)
        s.pair = second
        await s.open()
        await s.link.write(fragments(2))
        assert s.landed_slots() == {11: 1, 10: 2}
