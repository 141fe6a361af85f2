"""Bytes per second of parcels from one process to another over loopback TCP.

Per size of a parcel, in turns, on asyncio and on uvloop:

* ``plain``: ``sock_sendall`` and ``sock_recv_into`` of the same sizes on one connection, between
  the same slots; nothing is framed, proven or acknowledged;
* ``peers``: a sender seals each parcel, waits for a credit, and writes it with ``TcpLink``; the
  receiver verifies each parcel, acknowledges it and gives the slot of the next.

Each number is the median of the rounds; ``ratio_to_plain`` is the median of the ratios within each
round. ``idle`` is the CPU time of both ends of connections that carry nothing, as a share of the
elapsed time, per connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv._native import seal_blocks, verify_blocks
from aiokv.peers.listener import listen
from aiokv.peers.messages import (
    MAX_LISTED,
    Credit,
    Done,
    Landed,
    Proven,
    SlotCredit,
    Want,
    parcel_key,
)
from aiokv.peers.ring import LandingRing
from aiokv.peers.tcp import TcpLink, TcpTransport
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.peers.wire import Connection
from aiokv.stores.base import TRAILER_BYTES
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.peers.messages import Message

SIZES = {"128_kib": 128 << 10, "1_mib": 1 << 20, "4_mib": 4 << 20}
LOOPS: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {
    "asyncio": asyncio.run,
    "uvloop": uvloop.run,
}
PLAIN, PEERS, END = b"p", b"w", b"q"  # commands to the sender
TOTAL_BYTES = 256 << 20  # per round
MEMORY_BYTES = 32 << 20  # of the slots of each side
INLINE_BYTES = 256 << 10  # fewer are read on the loop, which is faster than a thread
BATCH_BYTES = 8 << 20  # that the sender seals at once
ACKNOWLEDGED_PART = 8  # of the slots at once: each message wakes the sender
SECRET = b"a secret of the bench of peers"
TICKET = bytes(16)
GENERATION = bytes(range(16))
IDLE_CONNECTIONS = 16


def run(quick: bool) -> dict[str, Any]:
    """Return GB/s by size of a parcel and loop, and the CPU share of idle connections."""
    rounds = 1 if quick else 9
    total = TOTAL_BYTES // 16 if quick else TOTAL_BYTES
    results: dict[str, Any] = {}
    for name, parcel_bytes in SIZES.items():
        count = max(4, total // parcel_bytes)
        seconds = {
            loop: run_on(_receive(loop, parcel_bytes, count, rounds))
            for loop, run_on in LOOPS.items()
        }
        results[name] = _summary(seconds, count * parcel_bytes)
    results["idle"] = {
        f"cpu_share_{loop}": run_on(_idle(1.0 if quick else 10.0)) for loop, run_on in LOOPS.items()
    }
    return results


def _summary(seconds: dict[str, list[tuple[float, float]]], num_bytes: int) -> dict[str, float]:
    results = {}
    for loop, rounds in seconds.items():
        plain, peers = (statistics.median(times) for times in zip(*rounds, strict=True))
        results[f"plain_{loop}_gbps"] = num_bytes / 1e9 / plain
        results[f"peers_{loop}_gbps"] = num_bytes / 1e9 / peers
        ratios = [of_plain / of_peers for of_plain, of_peers in rounds]
        results[f"ratio_to_plain_{loop}"] = statistics.median(ratios)
    return results


class _Slots:
    """Memory of one side."""

    def __init__(self, parcel_bytes: int) -> None:
        self.arena = HostArena(
            num_blocks=max(4, MEMORY_BYTES // parcel_bytes), block_bytes=parcel_bytes
        )
        self.arena.blocks[:] = np.random.default_rng(0).integers(0, 256, parcel_bytes, np.uint8)
        self.memory = PeerMemory(
            address=self.arena.pointer,
            num_slots=self.arena.num_blocks,
            slot_bytes=parcel_bytes,
            view=self.arena.blocks.reshape(-1).data,
        )
        self.threads = ThreadPoolExecutor(1)

    async def proof(self, function: Callable[..., Any], slots: list[int], keys: bytes) -> Any:
        memory = self.memory
        blocks = np.array(slots, np.int32)
        payload_bytes = memory.slot_bytes - TRAILER_BYTES

        def call() -> Any:
            return function(
                memory.address,
                memory.slot_bytes,
                payload_bytes,
                blocks,
                keys,
                num_blocks=memory.num_slots,
            )

        if len(slots) * payload_bytes < INLINE_BYTES:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)

    def close(self) -> None:
        self.threads.shutdown()


def _keys(blocks: list[int]) -> bytes:
    return b"".join(parcel_key(TICKET, GENERATION, 0, block, 0) for block in blocks)


# --- receiver, in this process ------------------------------------------------------------------


async def _receive(loop_name: str, size: int, count: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds in which ``count`` parcels arrived, plain and as a peer, per round."""
    slots = _Slots(size)
    receiver = _Receiver(slots)
    listener = await listen("127.0.0.1", 0, SECRET, receiver.start)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        options = json.dumps([loop_name, listening.getsockname()[1], listener.port, size, count])
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.peers_tcp", options
        )
        plain, _ = await loop.sock_accept(listening)
    with plain:
        plain.setblocking(False)
        seconds = []
        for _ in range(1 + rounds):
            began = time.perf_counter()
            await loop.sock_sendall(plain, PLAIN)
            await _receive_plain(plain, slots.memory, count)
            between = time.perf_counter()
            await loop.sock_sendall(plain, PEERS)
            await receiver.receive(count)
            seconds.append((between - began, time.perf_counter() - between))
        await loop.sock_sendall(plain, END)
        if await sender.wait():
            raise RuntimeError(f"peers_tcp: the sender exited with {sender.returncode}")
    await receiver.connection.closed()
    await listener.aclose()
    slots.close()
    return seconds[1:]  # the first round warms the connections up


async def _receive_plain(plain: socket.socket, memory: PeerMemory, count: int) -> None:
    loop = asyncio.get_running_loop()
    for parcel in range(count):
        target = memory.slot(parcel % memory.num_slots, memory.slot_bytes)
        while target:
            target = target[await loop.sock_recv_into(plain, target) :]


class _Receiver:
    """Handler of the receiving end."""

    def __init__(self, slots: _Slots) -> None:
        self.slots = slots
        self.left = 0
        self.ring: LandingRing[str] = LandingRing(slots.memory.num_slots)
        self.connection: Connection | None = None
        self.arrived: list[Landed] = []
        self.proven: list[int] = []  # not acknowledged yet
        self.proving: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, connection: Connection) -> None:
        self.connection = connection
        connection.start(self)

    async def receive(self, count: int) -> None:
        """Return when ``count`` parcels are proven."""
        self.left = count
        self.ended = asyncio.get_running_loop().create_future()
        await self.ended

    def on_message(self, message: Message) -> None:
        if isinstance(message, Want):
            self.ring.want("sender", message.parcels)
            self.give_credit()

    def give_credit(self) -> None:
        for _, slots in self.ring.grant():
            self.connection.send(Credit(slots=slots))

    def place(self, landed: Landed) -> memoryview | None:
        if not self.ring.land("sender", landed.credit):
            return None
        return self.slots.memory.slot(landed.slot, landed.parcel_bytes)

    def on_parcel(self, landed: Landed) -> None:
        self.ring.landed(landed.slot)
        self.arrived.append(landed)
        if self.proving is None:
            self.proving = asyncio.get_running_loop().create_task(self.prove())

    async def prove(self) -> None:
        while self.arrived:
            landed, self.arrived = self.arrived, []
            blocks = [parcel.sender_block for parcel in landed]
            slots = [parcel.slot for parcel in landed]
            results = await self.slots.proof(verify_blocks, slots, _keys(blocks))
            if results.any():
                raise RuntimeError("peers_tcp: a parcel is wrong")
            for slot in slots:
                self.ring.free(slot)
            self.proven += blocks
            self.left -= len(blocks)
            if len(self.proven) >= self.ring.num_slots // ACKNOWLEDGED_PART or not self.left:
                self.give_credit()
                self.connection.send(Proven(ticket_id=TICKET, sender_blocks=self.proven))
                self.proven = []
        self.proving = None
        if not self.left:
            self.connection.send(Done(ticket_id=TICKET))
            self.ended.set_result(None)

    def on_closed(self, reason: str) -> None:
        if self.left and not self.ended.done():
            self.ended.set_exception(RuntimeError(f"peers_tcp: {reason}"))


# --- sender, in another process -----------------------------------------------------------------


async def _send(loop_name: str, plain_port: int, port: int, size: int, count: int) -> None:
    slots = _Slots(size)
    sender = _Sender()
    connection = await Connection.open("127.0.0.1", port, SECRET, timeout=30.0)
    connection.start(sender)
    transport = TcpTransport()
    await transport.open(slots.memory, slots.memory)
    link = await transport.connect(connection, b"")
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", plain_port)) as plain:
        plain.setblocking(False)
        while (command := await loop.sock_recv(plain, 1)) != END:
            if command == PLAIN:
                await _send_plain(plain, slots.memory, count)
            else:
                await _send_parcels(connection, link, sender, slots, count)
    connection.close()
    await connection.closed()
    slots.close()


async def _send_plain(plain: socket.socket, memory: PeerMemory, count: int) -> None:
    loop = asyncio.get_running_loop()
    for parcel in range(count):
        await loop.sock_sendall(plain, memory.slot(parcel % memory.num_slots, memory.slot_bytes))


class _Sender:
    """Handler of the sending end."""

    def __init__(self) -> None:
        self.credits: deque[SlotCredit] = deque()
        self.given = asyncio.Event()
        self.done: asyncio.Future[None] | None = None  # of the parcels that are being sent

    def on_message(self, message: Message) -> None:
        if isinstance(message, Credit):
            self.credits.extend(message.slots)
            self.given.set()
        elif isinstance(message, Done) and self.done is not None:
            self.done.set_result(None)

    def place(self, landed: Landed) -> memoryview | None:
        return None

    def on_parcel(self, landed: Landed) -> None:
        pass

    def on_closed(self, reason: str) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(RuntimeError(f"peers_tcp: {reason}"))


async def _send_parcels(
    connection: Connection, link: TcpLink, sender: _Sender, slots: _Slots, count: int
) -> None:
    sender.done = asyncio.get_running_loop().create_future()
    for begin in range(0, count, MAX_LISTED):
        connection.send(Want(ticket_id=TICKET, parcels=min(MAX_LISTED, count - begin)))
    batch = max(1, BATCH_BYTES // slots.memory.slot_bytes)
    batches = slots.memory.num_slots // batch
    writes: deque[asyncio.Task[None]] = deque()
    for begin in range(0, count, batch):
        blocks = list(range(begin, min(begin + batch, count)))
        if len(writes) == batches - 1:  # these slots are still being read
            await writes.popleft()
        places = [block % (batch * batches) for block in blocks]
        await slots.proof(seal_blocks, places, _keys(blocks))
        writes.append(asyncio.ensure_future(_write(link, sender, blocks, places, slots.memory)))
    for write in writes:
        await write
    await sender.done


async def _write(
    link: TcpLink, sender: _Sender, blocks: list[int], places: list[int], memory: PeerMemory
) -> None:
    waiting = deque(zip(blocks, places, strict=True))
    while waiting:
        while not sender.credits:
            sender.given.clear()
            await sender.given.wait()
        parcels = []
        while waiting and sender.credits:
            block, place = waiting.popleft()
            slot, generation = sender.credits.popleft()
            landed = Landed(
                ticket_id=TICKET,
                sender_block=block,
                slot=slot,
                slot_generation=generation,
                parcel_bytes=memory.slot_bytes,
            )
            parcels.append(Outgoing(place, landed))
        await link.write(parcels)


# --- idle connections ---------------------------------------------------------------------------


async def _idle(seconds: float) -> float:
    """Return the CPU share of one idle connection, both of whose ends are on this loop."""
    ends: list[Connection] = []

    def start(connection: Connection) -> None:
        connection.start(_Sender())
        ends.append(connection)

    listener = await listen("127.0.0.1", 0, SECRET, start)
    for _ in range(IDLE_CONNECTIONS):
        start(await Connection.open("127.0.0.1", listener.port, SECRET, timeout=30.0))
    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu_began) / (time.perf_counter() - began) / IDLE_CONNECTIONS
    for end in ends:
        end.abort("closed")
    await listener.aclose()
    return share


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    LOOPS[arguments[0]](_send(*arguments))
