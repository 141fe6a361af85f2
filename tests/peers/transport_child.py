"""A process at the other end of a one-sided transport: python -m ... ROLE TRANSPORT PORT MODE."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from aiokv.peers.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Credit,
    Landed,
    Open,
    Return,
    SlotCredit,
    Want,
)
from aiokv.peers.mooncake import MooncakeBackend
from aiokv.peers.nixl import NixlBackend
from aiokv.peers.one_sided import OneSidedTransport
from aiokv.peers.ring import LandingRing
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.peers.wire import Connection, connect
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.worker.arena import HostArena
from tests.peers.wires import HOST, SECRET, TICKET

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.peers.messages import Message

SLOT_BYTES = 64 << 10
NUM_SLOTS = 8
GENERATION = bytes(16)


def transport_of(name: str, before_write: Callable[[], object] = lambda: None) -> OneSidedTransport:
    """Return a transport that calls ``before_write`` in its thread before each write."""
    backend: Any = NixlBackend({}) if name == "nixl" else MooncakeBackend(HOST, {})
    create = backend.create

    def create_observed(memory: PeerMemory, *, receives: bool) -> Any:
        endpoint = create(memory, receives=receives)
        write = endpoint.write

        def write_observed(pieces: Any, unwanted: Any) -> None:
            before_write()
            write(pieces, unwanted)

        endpoint.write = write_observed
        return endpoint

    backend.create = create_observed
    return OneSidedTransport(backend)


class Slots:
    """Memory of one side."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.arena = HostArena(num_blocks=max(num_slots, 1), pitch_bytes=SLOT_BYTES)
        self.blocks = self.arena.blocks
        self.memory = PeerMemory(
            address=self.arena.pointer,
            num_slots=num_slots,
            slot_bytes=SLOT_BYTES,
            view=self.blocks.reshape(-1).data,
        )


def content(block: int) -> int:
    """Return the byte that a fragment consists of; never 0."""
    return block % 255 + 1


class SendingEnd:
    """Handler of a sender: writes a fragment for each credit."""

    def __init__(self, transport: OneSidedTransport, connection: Connection) -> None:
        self.transport = transport
        self.connection = connection
        self.slots = Slots()
        self.block = 0
        self.link: Any = None
        self.failure: Exception | None = None
        self.free = set(range(NUM_SLOTS))
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        await self.transport.open(Slots(0).memory, self.slots.memory)
        self.connection.start(self)
        self.connection.send(
            Open(
                protocol=PROTOCOL_VERSION,
                ticket_id=TICKET,
                generation=GENERATION,
                sender_rank=0,
                receiver_rank=0,
                sender_block_tokens=1,
                layout=b"",
                transport=self.transport.name,
                transport_metadata=self.transport.metadata(),
            )
        )

    def on_message(self, message: Message) -> None:
        if isinstance(message, Accepted):
            self.spawn(self.connect(message.transport_metadata))
        elif isinstance(message, Credit):
            for credit in message.slots:
                self.spawn(self.write(credit))

    async def connect(self, metadata: bytes) -> None:
        self.link = await self.transport.connect(self.connection, metadata)
        self.connection.send(Want(ticket_id=TICKET, fragments=8000))

    async def write(self, credit: SlotCredit) -> None:
        if not self.free:
            self.connection.send(Return(slots=[credit]))
            return
        slot, block = self.free.pop(), self.block
        self.block += 1
        self.slots.blocks[slot] = content(block)
        landed = Landed(
            ticket_id=TICKET,
            sender_block=block,
            slot=credit.slot,
            slot_generation=credit.generation,
            fragment_bytes=SLOT_BYTES,
        )
        try:
            await self.link.write([Outgoing(slot, landed)])
        except Exception as error:
            self.failure = error
            self.connection.abort(str(error))
        self.free.add(slot)

    def place(self, landed: Landed) -> memoryview | None:
        return None

    def on_fragment(self, landed: Landed) -> None:
        raise AssertionError

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def aclose(self) -> None:
        self.connection.abort("closed")
        await self.closed
        if self.tasks:
            await asyncio.wait(set(self.tasks))
        await self.transport.aclose()


class ReceivingEnd:
    """Handler of a receiver: gives credits, checks each fragment, and frees its slot."""

    def __init__(self, transport: OneSidedTransport) -> None:
        self.transport = transport
        self.connection: Any = None
        self.slots = Slots()
        self.ring: LandingRing[Connection] = LandingRing(NUM_SLOTS)
        self.blocks: list[int] = []
        self.wrong: list[int] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.gives = True
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        await self.transport.open(self.slots.memory, Slots(0).memory)

    def start(self, connection: Connection) -> None:
        self.connection = connection
        connection.start(self)

    def on_message(self, message: Message) -> None:
        if isinstance(message, Open):
            task = asyncio.ensure_future(self.accept(message.transport_metadata))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif isinstance(message, Want):
            self.ring.want(self.connection, message.fragments)
        elif isinstance(message, Return):
            for credit in message.slots:
                self.ring.give_back(self.connection, credit)
        elif isinstance(message, Landed):
            self.land(message)
        self.give()

    async def accept(self, metadata: bytes) -> None:
        metadata = await self.transport.accept(self.connection, metadata)
        self.connection.send(
            Accepted(ticket_id=TICKET, slot_bytes=SLOT_BYTES, transport_metadata=metadata)
        )

    def land(self, message: Landed) -> None:
        assert self.ring.land(self.connection, message.credit)
        self.ring.landed(message.slot)
        if not (self.slots.blocks[message.slot] == content(message.sender_block)).all():
            self.wrong.append(message.sender_block)
        self.blocks.append(message.sender_block)
        self.ring.free(message.slot)

    def give(self) -> None:
        for connection, slots in self.ring.grant() if self.gives else ():
            connection.send(Credit(slots=slots))
        assert self.ring.violations() == []

    def place(self, landed: Landed) -> memoryview | None:
        return None

    def on_fragment(self, landed: Landed) -> None:
        raise AssertionError

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)


async def main(role: str, name: str, port: int, mode: str) -> None:
    def stop_once() -> None:
        if mode == "stop" and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)

    stopped: list[bool] = []
    transport = transport_of(name, stop_once)
    connection = await connect(HOST, port, SECRET, timeout=PATIENCE_SECONDS)
    if role == "sender":
        sender = SendingEnd(transport, connection)
        await sender.open()
        await sender.closed
        await sender.aclose()
    else:
        receiver = ReceivingEnd(transport)
        await receiver.open()
        receiver.start(connection)
        await receiver.closed
        await transport.aclose()
        assert not receiver.wrong, receiver.wrong


if __name__ == "__main__":
    role, name, port, mode = sys.argv[1:]
    asyncio.run(main(role, name, int(port), mode))
