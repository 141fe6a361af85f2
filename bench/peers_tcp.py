"""Bytes per second of fragments from one process to another over loopback TCP.

Per size of a fragment, in turns, on asyncio and on uvloop:

* ``plain``: ``sock_sendall`` and ``sock_recv_into`` of the same sizes on one connection, between
  the same slots; nothing is framed, proven or acknowledged;
* ``peers``: a sender seals each fragment, waits for a credit, and writes it with ``TcpLink``; the
  receiver verifies each fragment, acknowledges it and gives the slot of the next.

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
from typing import TYPE_CHECKING, Any

import uvloop

from aiokv._native import verify_blocks
from aiokv.peers.messages import Credit, Done, Landed, Proven, Want
from aiokv.peers.ring import LandingRing
from aiokv.peers.tcp import TcpTransport
from aiokv.peers.wire import Connection, connect, listen
from bench.fragments import BATCH_BYTES, SECRET, SIZES, TICKET, Sending, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.peers.messages import Message
    from aiokv.peers.transport import PeerMemory

LOOPS: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {
    "asyncio": asyncio.run,
    "uvloop": uvloop.run,
}
PLAIN, PEERS, END = b"p", b"w", b"q"  # commands to the sender
TOTAL_BYTES = 256 << 20  # per round
MEMORY_BYTES = 32 << 20  # of the slots of each side
ACKNOWLEDGED_PART = 8  # of the slots at once: each message wakes the sender
IDLE_CONNECTIONS = 16


def run(quick: bool) -> dict[str, Any]:
    """Return GB/s by size of a fragment and loop, and the CPU share of idle connections."""
    rounds = 1 if quick else 9
    total = TOTAL_BYTES // 16 if quick else TOTAL_BYTES
    results: dict[str, Any] = {}
    for name, fragment_bytes in SIZES.items():
        count = max(4, total // fragment_bytes)
        seconds = {
            loop: run_on(_receive(loop, fragment_bytes, count, rounds))
            for loop, run_on in LOOPS.items()
        }
        results[name] = _summary(seconds, count * fragment_bytes)
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


# --- receiver, in this process ------------------------------------------------------------------


async def _receive(loop_name: str, size: int, count: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds in which ``count`` fragments arrived, plain and as a peer, per round."""
    slots = Slots(size, MEMORY_BYTES // size)
    receiver = _Receiver(slots)
    listener = await listen("127.0.0.1", 0, SECRET, receiver.start)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        options = json.dumps(
            [loop_name, listening.getsockname()[1], listener.address[1], size, count]
        )
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
    for fragment in range(count):
        target = memory.slot(fragment % memory.num_slots, memory.slot_bytes)
        while target:
            target = target[await loop.sock_recv_into(plain, target) :]


class _Receiver:
    """Handler of the receiving end."""

    def __init__(self, slots: Slots) -> None:
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
        """Return when ``count`` fragments are proven."""
        self.left = count
        self.ended = asyncio.get_running_loop().create_future()
        await self.ended

    def on_message(self, message: Message) -> None:
        if isinstance(message, Want):
            self.ring.want("sender", message.fragments)
            self.give_credit()

    def give_credit(self) -> None:
        for _, slots in self.ring.grant():
            self.connection.send(Credit(slots=slots))

    def place(self, landed: Landed) -> memoryview | None:
        if not self.ring.land("sender", landed.credit):
            return None
        return self.slots.memory.slot(landed.slot, landed.fragment_bytes)

    def on_fragment(self, landed: Landed) -> None:
        self.ring.landed(landed.slot)
        self.arrived.append(landed)
        if self.proving is None:
            self.proving = asyncio.get_running_loop().create_task(self.prove())

    async def prove(self) -> None:
        while self.arrived:
            landed, self.arrived = self.arrived, []
            blocks = [fragment.sender_block for fragment in landed]
            slots = [fragment.slot for fragment in landed]
            results = await self.slots.proof(verify_blocks, slots, blocks)
            if results.any():
                raise RuntimeError("peers_tcp: a fragment is wrong")
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
    slots = Slots(size, MEMORY_BYTES // size)
    sender = _Sender()
    connection = await connect("127.0.0.1", port, SECRET, timeout=30.0)
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
                await sender.sending.send(
                    connection, link, slots, count, max_writes=MEMORY_BYTES // BATCH_BYTES - 1
                )
    connection.close()
    await connection.closed()
    slots.close()


async def _send_plain(plain: socket.socket, memory: PeerMemory, count: int) -> None:
    loop = asyncio.get_running_loop()
    for fragment in range(count):
        await loop.sock_sendall(plain, memory.slot(fragment % memory.num_slots, memory.slot_bytes))


class _Sender:
    """Handler of the sending end."""

    def __init__(self) -> None:
        self.sending = Sending()

    def on_message(self, message: Message) -> None:
        self.sending.on_message(message)

    def place(self, landed: Landed) -> memoryview | None:
        return None

    def on_fragment(self, landed: Landed) -> None:
        pass

    def on_closed(self, reason: str) -> None:
        self.sending.fail(f"peers_tcp: {reason}")


# --- idle connections ---------------------------------------------------------------------------


async def _idle(seconds: float) -> float:
    """Return the CPU share of one idle connection, both of whose ends are on this loop."""
    ends: list[Connection] = []

    def start(connection: Connection) -> None:
        connection.start(_Sender())
        ends.append(connection)

    listener = await listen("127.0.0.1", 0, SECRET, start)
    for _ in range(IDLE_CONNECTIONS):
        start(await connect("127.0.0.1", listener.address[1], SECRET, timeout=30.0))
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
