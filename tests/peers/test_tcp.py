"""TcpTransport: fragments go from slot to slot, and cancelled writes return their credits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import InternalError, PeerError
from aiokv.peers.messages import Credit, Done, Proven, Return, SlotCredit, Want
from aiokv.peers.ring import LandingRing
from aiokv.peers.tcp import TcpTransport
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.testing import spin
from aiokv.testing.loops import run_until_idle
from tests.peers.wires import TICKET, Recorder, connected, landed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.peers.messages import Landed, Message
    from aiokv.peers.tcp import TcpLink
    from aiokv.peers.transport import Link, Transport
    from aiokv.peers.wire import Connection

SLOT_BYTES = 1 << 20


def memory(num_slots: int, slot_bytes: int = SLOT_BYTES) -> PeerMemory:
    blocks = np.zeros((num_slots, slot_bytes), np.uint8)
    return PeerMemory(
        address=blocks.ctypes.data,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        view=blocks.reshape(-1).data,
    )


class Sides:
    """A sender with a link, and the recording handlers of both ends."""

    def __init__(self, pair: object, link: TcpLink, outgoing: PeerMemory) -> None:
        self.pair = pair
        self.link = link
        self.outgoing = outgoing
        self.at_server: Recorder = pair.at_server
        for slot in range(outgoing.num_slots):
            outgoing.slot(slot, SLOT_BYTES)[:] = bytes([slot + 1]) * SLOT_BYTES


def fragments(count: int, num_bytes: int = SLOT_BYTES) -> list[Outgoing]:
    return [Outgoing(slot, landed(num_bytes, slot=slot, block=slot)) for slot in range(count)]


@asynccontextmanager
async def sides() -> AsyncIterator[Sides]:
    async with connected() as pair:
        transport: Transport = TcpTransport()
        outgoing = memory(8)
        await transport.open(memory(1), outgoing)
        assert transport.metadata() == b""
        link: Link = await transport.connect(pair.client, b"")
        yield Sides(pair, link, outgoing)
        await link.aclose()
        await transport.fence(pair.server, may_write=True)
        await transport.aclose()


@pytest.mark.asyncio
async def test_fragments_of_one_write_arrive_in_order():
    async with sides() as s:
        s.pair.start()
        await s.link.write(fragments(8))
        await s.link.write(fragments(1, num_bytes=100))
        await run_until_idle(lambda: len(s.at_server.fragments) == 9)
        for slot, (message, data) in enumerate(s.at_server.fragments[:8]):
            assert message.slot == slot
            assert data == bytes([slot + 1]) * SLOT_BYTES
        assert s.at_server.fragments[8][1] == bytes([1]) * 100


@pytest.mark.asyncio
async def test_concurrent_writes_arrive_in_the_order_of_the_calls():
    async with sides() as s:
        s.pair.start()
        writes = [asyncio.create_task(s.link.write([fragment])) for fragment in fragments(8)]
        await asyncio.gather(*writes)
        await run_until_idle(lambda: len(s.at_server.fragments) == 8)
        assert [message.slot for message, _ in s.at_server.fragments] == list(range(8))


@pytest.mark.asyncio
async def test_outgoing_slot_can_be_reused_after_the_write():
    async with sides() as s:
        s.pair.shrink_buffers()
        s.pair.client.start(Recorder())
        writing = asyncio.create_task(s.link.write(fragments(2)))
        await run_until_idle(lambda: s.pair.client.sent_bytes > 0)
        await spin(20)
        assert not writing.done()  # the kernel has taken a part only
        s.pair.server.start(s.at_server)
        await writing
        s.outgoing.view[:] = bytes(len(s.outgoing.view))
        await run_until_idle(lambda: len(s.at_server.fragments) == 2)
        assert [data[-1] for _, data in s.at_server.fragments] == [1, 2]


@pytest.mark.asyncio
async def test_write_that_is_cancelled_before_it_begins_gives_its_credits_back():
    async with sides() as s:
        s.pair.shrink_buffers()
        s.pair.client.start(Recorder())
        first = asyncio.create_task(s.link.write(fragments(1)))
        await run_until_idle(lambda: s.pair.client.sent_bytes > 0)
        writing = asyncio.create_task(s.link.write(fragments(3)))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not first.done()
        s.pair.server.start(s.at_server)
        await first
        await run_until_idle(lambda: bool(s.at_server.messages))
        assert s.at_server.messages == [Return(slots=[SlotCredit(slot, 1) for slot in range(3)])]
        assert len(s.at_server.fragments) == 1


@pytest.mark.asyncio
async def test_cancelled_write_ends_when_the_fragment_that_has_begun_is_sent():
    async with sides() as s:
        s.pair.shrink_buffers()
        s.pair.client.start(Recorder())
        writing = asyncio.create_task(s.link.write(fragments(3)))
        await run_until_idle(lambda: s.pair.client.sent_bytes > 0)
        for _ in range(3):  # cancelled again and again, as by anyio
            writing.cancel()
            await spin(3)
            assert not writing.done()
        s.pair.server.start(s.at_server)
        with pytest.raises(asyncio.CancelledError):
            await writing
        await run_until_idle(lambda: bool(s.at_server.messages))
        assert [message.slot for message, _ in s.at_server.fragments] == [0]
        assert s.at_server.fragments[0][1] == bytes([1]) * SLOT_BYTES
        assert s.at_server.messages == [Return(slots=[SlotCredit(1, 1), SlotCredit(2, 1)])]


@pytest.mark.asyncio
async def test_cancelled_write_ends_with_its_connection():
    async with sides() as s:
        s.pair.shrink_buffers()
        s.pair.client.start(Recorder())
        writing = asyncio.create_task(s.link.write(fragments(3)))
        await run_until_idle(lambda: s.pair.client.sent_bytes > 0)
        writing.cancel()
        await spin(3)
        s.pair.client.abort("lost")
        with pytest.raises(asyncio.CancelledError):
            await writing


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.asyncio
async def test_write_on_a_lost_connection_raises(begun):
    async with sides() as s:
        s.pair.shrink_buffers()
        s.pair.client.start(Recorder())
        writing = asyncio.create_task(s.link.write(fragments(3)))
        if begun:
            await run_until_idle(lambda: s.pair.client.sent_bytes > 0)
        else:
            await asyncio.sleep(0)
        s.pair.client.abort("the peer sent nothing for 6.0 s")
        with pytest.raises(PeerError, match="the peer sent nothing for"):
            await writing
        with pytest.raises(PeerError, match="the peer sent nothing for"):
            await s.link.write(fragments(1))


@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 100), (8, 100), (0, SLOT_BYTES + 1)])
@pytest.mark.asyncio
async def test_fragment_outside_the_outgoing_memory_is_a_bug(slot, num_bytes):
    async with sides() as s:
        s.pair.start()
        with pytest.raises(InternalError, match="the memory has 8 slots"):
            await s.link.write([*fragments(1), Outgoing(slot, landed(num_bytes))])
        await spin(20)
        assert s.at_server.fragments == []


@pytest.mark.asyncio
async def test_transport_that_is_not_open_makes_no_link():
    async with connected() as pair:
        with pytest.raises(InternalError, match="not open"):
            await TcpTransport().connect(pair.client, b"")


class Receiver(Recorder):
    """Gives credits of a ring, and reads fragments into the slots of a memory."""

    def __init__(self, slots: PeerMemory) -> None:
        super().__init__()
        self.slots = slots
        self.ring: LandingRing[Connection] = LandingRing(slots.num_slots)
        self.connection: Connection | None = None
        self.contents: dict[int, int] = {}

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        if isinstance(message, Want):
            self.ring.want(self.connection, message.fragments)
        elif isinstance(message, Return):
            for credit in message.slots:
                assert self.ring.give_back(self.connection, credit)
            self.ring.unwant(self.connection, message.unwanted)
        self.give()

    def give(self) -> None:
        for connection, slots in self.ring.grant():
            connection.send(Credit(slots=slots))
        assert self.ring.violations() == []

    def place(self, message: Landed) -> memoryview | None:
        if not self.ring.land(self.connection, message.credit):
            return None
        return self.slots.slot(message.slot, message.fragment_bytes)

    def on_fragment(self, message: Landed) -> None:
        self.ring.landed(message.slot)
        (content,) = set(self.slots.slot(message.slot, message.fragment_bytes))
        self.contents[message.sender_block] = content
        self.ring.free(message.slot)
        self.connection.send(Proven(ticket_id=TICKET, sender_blocks=[message.sender_block]))
        self.give()


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.asyncio
async def test_many_fragments_pass_through_a_small_ring(num_slots):
    async with sides() as s:
        receiver = Receiver(memory(num_slots, 4096))
        receiver.connection = s.pair.server
        s.pair.server.start(receiver)
        sender = Recorder()
        blocks = iter(range(20))

        def write(message: Message) -> None:
            if isinstance(message, Credit):
                for credit in message.slots:
                    block = next(blocks)
                    fragment = landed(4096, credit.slot, block)
                    fragment = Outgoing(block % 8, _with(fragment, credit))
                    tasks.append(asyncio.create_task(s.link.write([fragment])))

        tasks: list[asyncio.Task[None]] = []
        sender.at_message = write
        s.pair.client.start(sender)
        s.pair.client.send(Want(ticket_id=TICKET, fragments=20))
        await run_until_idle(lambda: len(receiver.contents) == 20)
        await asyncio.gather(*tasks)
        assert receiver.contents == {block: block % 8 + 1 for block in range(20)}
        assert receiver.ring.is_idle
        assert receiver.ring.statistics().credits == 20
        assert receiver.ring.statistics().stale == 0
        await run_until_idle(
            lambda: sum(isinstance(message, Proven) for message in sender.messages) == 20
        )


@pytest.mark.asyncio
async def test_fragment_of_an_ended_credit_is_discarded_and_overwrites_nothing():
    async with sides() as s:
        receiver = Receiver(memory(1, 4096))
        receiver.connection = s.pair.server
        s.pair.server.start(receiver)
        sender = Recorder()
        s.pair.client.start(sender)
        s.pair.client.send(Want(ticket_id=TICKET, fragments=1))
        await run_until_idle(lambda: bool(sender.messages))
        (credit,) = sender.messages[0].slots
        receiver.ring.revoke(s.pair.server, may_write=False)
        s.pair.client.send(Want(ticket_id=TICKET, fragments=1))  # the slot has a credit again
        await s.link.write([Outgoing(0, _with(landed(4096), credit))])
        s.pair.client.send(Done(ticket_id=TICKET))
        await run_until_idle(lambda: len(receiver.messages) == 3)
        assert sender.messages[1].slots == [SlotCredit(0, 2)]
        assert receiver.contents == {}
        assert bytes(receiver.slots.view) == bytes(4096)
        assert receiver.ring.statistics().stale == 1


def _with(message: Landed, credit: SlotCredit) -> Landed:
    return type(message)(
        ticket_id=message.ticket_id,
        sender_block=message.sender_block,
        slot=credit.slot,
        slot_generation=credit.generation,
        fragment_bytes=message.fragment_bytes,
    )
