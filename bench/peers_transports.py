"""Bytes per second of fragments through NIXL and Mooncake, from one process to another.

Per transport that is installed, and per size of a fragment, in turns:

* ``raw``: the library alone writes half of the slots per call, again and again; nothing is framed,
  proven or acknowledged;
* ``peers``: a sender seals each fragment, waits for a credit, and writes it with a link; the
  receiver verifies each fragment, acknowledges it and gives the slot of the next.

Each number is the median of the rounds; ``ratio_to_raw`` is the median of the ratios within each
round. ``idle`` is the CPU time of both ends of a connection that carries nothing, as a share of the
elapsed time.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from aiokv._native import verify_blocks
from aiokv.errors import ConfigError
from aiokv.peers.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Credit,
    Done,
    Landed,
    Open,
    Proven,
    Want,
)
from aiokv.peers.mooncake import MooncakeBackend
from aiokv.peers.nixl import NixlBackend
from aiokv.peers.one_sided import OneSidedTransport, WritePiece
from aiokv.peers.ring import LandingRing
from aiokv.peers.wire import Connection, connect, listen
from bench.fragments import GENERATION, SECRET, SIZES, TICKET, Sending, Slots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.peers.messages import Message
    from aiokv.peers.transport import PeerMemory

HOST = "127.0.0.1"
WAYS = ("raw", "peers")
TRANSPORTS: dict[str, tuple[str, dict[str, str]]] = {  # name and environment of each
    "nixl_shared_memory": ("nixl", {}),
    "nixl_tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "mooncake_tcp": ("mooncake", {"MC_TCP_BIND_ADDRESS": HOST}),
}
TOTAL_BYTES = 512 << 20  # per round
TRANSFER_SECONDS = 120.0  # afterwards the sender counts as lost
MEMORY_BYTES = 64 << 20  # of the slots of each side
MAX_WRITES = 4  # number of batches that are written while the next one is sealed


def run(quick: bool) -> dict[str, Any]:
    """Return GB/s by transport and size of a fragment, and the CPU share of idle connections."""
    results: dict[str, Any] = {}
    for name, (library, environment) in TRANSPORTS.items():
        # A separate process: the libraries read their environment once and keep descriptors.
        command = [sys.executable, "-m", "bench.peers_transports", "measure", library]
        measured = subprocess.run(
            [*command, json.dumps(quick)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        measures = json.loads(measured.stdout.splitlines()[-1])
        if measures is None:
            print(f"bench: {name} is left out", file=sys.stderr)
        else:
            results[name] = measures
    return results


def measure(library: str, quick: bool) -> dict[str, Any] | None:
    """Return the results of one transport; None if its library is not installed."""
    try:
        _backend(library).load()
    except ConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return None
    rounds = 1 if quick else 3
    total = TOTAL_BYTES // 16 if quick else TOTAL_BYTES
    results: dict[str, Any] = {}
    sizes = {"1_mib": SIZES["1_mib"]} if quick else SIZES
    for name, fragment_bytes in sizes.items():
        seconds: dict[str, list[float]] = defaultdict(list)
        count = max(4, total // fragment_bytes)
        for _ in range(rounds):
            for way in WAYS:
                seconds[way].append(uvloop.run(_receive(way, library, fragment_bytes, count)))
        gigabytes = count * fragment_bytes / 1e9
        gbps = {f"{way}_gbps": gigabytes / statistics.median(seconds[way]) for way in WAYS}
        ratios = [raw / ours for raw, ours in zip(seconds["raw"], seconds["peers"], strict=True)]
        results[name] = gbps | {"ratio_to_raw": statistics.median(ratios)}
    results["idle"] = {"cpu_share": uvloop.run(_idle(library, 1.0 if quick else 10.0))}
    return results


def _backend(library: str) -> NixlBackend | MooncakeBackend:
    return NixlBackend({}) if library == "nixl" else MooncakeBackend(HOST, {})


class _End:
    """Handler of one end; fragments do not travel on the connection."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, connection: Connection) -> None:
        self.connection = connection
        connection.start(self)

    def place(self, landed: Landed) -> memoryview | None:
        return None

    def on_fragment(self, landed: Landed) -> None:
        raise RuntimeError("peers_transports: a fragment came on the connection")

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)


# --- receiver, in this process ------------------------------------------------------------------


class _Receiver(_End):
    def __init__(self, transport: OneSidedTransport, slots: Slots, count: int) -> None:
        super().__init__()
        self.transport = transport
        self.slots = slots
        self.left = count
        self.ring: LandingRing[str] = LandingRing(slots.memory.num_slots)
        self.arrived: list[Landed] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.proving: asyncio.Task[None] | None = None
        self.began = 0.0
        self.seconds: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.accepted = asyncio.Event()

    def on_message(self, message: Message) -> None:
        if isinstance(message, Open):
            self.tasks.add(asyncio.ensure_future(self.accept(message.transport_metadata)))
        elif isinstance(message, Want):
            self.began = self.began or time.perf_counter()
            self.ring.want("sender", message.fragments)
            self.give_credit()
        elif isinstance(message, Landed):
            if not self.ring.land("sender", message.credit):
                raise RuntimeError("peers_transports: a fragment has no credit")
            self.ring.landed(message.slot)
            self.arrived.append(message)
            if self.proving is None:
                self.proving = asyncio.ensure_future(self.prove())
        elif isinstance(message, Done):  # of a raw transfer
            self.seconds.set_result(time.perf_counter() - self.began)

    async def accept(self, metadata: bytes) -> None:
        metadata = await self.transport.accept(self.connection, metadata)
        slot_bytes = self.slots.memory.slot_bytes
        self.connection.send(
            Accepted(ticket_id=TICKET, slot_bytes=slot_bytes, transport_metadata=metadata)
        )
        self.accepted.set()

    def give_credit(self) -> None:
        for _, slots in self.ring.grant():
            self.connection.send(Credit(slots=slots))

    async def prove(self) -> None:
        while self.arrived:
            landed, self.arrived = self.arrived, []
            blocks = [fragment.sender_block for fragment in landed]
            slots = [fragment.slot for fragment in landed]
            results = await self.slots.proof(verify_blocks, slots, blocks)
            if results.any():
                raise RuntimeError("peers_transports: a fragment is wrong")
            for slot in slots:
                self.ring.free(slot)
            self.give_credit()
            self.connection.send(Proven(ticket_id=TICKET, sender_blocks=blocks))
            self.left -= len(blocks)
        self.proving = None
        if not self.left:
            self.seconds.set_result(time.perf_counter() - self.began)
            self.connection.send(Done(ticket_id=TICKET))


async def _receive(way: str, library: str, fragment_bytes: int, count: int) -> float:
    """Return the seconds in which ``count`` fragments of another process arrived."""
    slots = Slots(fragment_bytes, MEMORY_BYTES // fragment_bytes)
    transport = OneSidedTransport(_backend(library))
    await transport.open(slots.memory, Slots(fragment_bytes, 0).memory)
    receiver = _Receiver(transport, slots, count)
    listener = await listen(HOST, 0, SECRET, receiver.start)
    options = json.dumps([way, library, listener.address[1], fragment_bytes, count])
    command = [sys.executable, "-m", "bench.peers_transports", "send", options]
    with subprocess.Popen(command) as sender:  # noqa: ASYNC220
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                ends = [receiver.seconds, receiver.closed]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not receiver.seconds.done():
                    reason = receiver.closed.result()
                    raise RuntimeError(f"peers_transports: the sender ended: {reason}")
                await receiver.closed
            await transport.aclose()
            if sender.wait(30):
                raise RuntimeError(f"peers_transports: the sender exited with {sender.returncode}")
        except BaseException:
            sender.kill()
            raise
    await listener.aclose()
    slots.close()
    return receiver.seconds.result()


# --- sender, in another process -----------------------------------------------------------------


class _Sender(_End):
    def __init__(self) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self.sending = Sending()
        self.accepted: asyncio.Future[bytes] = loop.create_future()

    def on_message(self, message: Message) -> None:
        if isinstance(message, Accepted):
            self.accepted.set_result(message.transport_metadata)
        else:
            self.sending.on_message(message)

    async def open(self, transport: OneSidedTransport) -> Any:
        self.connection.send(
            Open(
                protocol=PROTOCOL_VERSION,
                ticket_id=TICKET,
                generation=GENERATION,
                sender_rank=0,
                receiver_rank=0,
                sender_block_tokens=1,
                layout=b"",
                transport=transport.name,
                transport_metadata=transport.metadata(),
            )
        )
        return await transport.connect(self.connection, await self.accepted)


async def _send(way: str, library: str, port: int, fragment_bytes: int, count: int) -> None:
    slots = Slots(fragment_bytes, MEMORY_BYTES // fragment_bytes)
    backend = _ObservedBackend(_backend(library))
    transport = OneSidedTransport(backend)
    await transport.open(Slots(fragment_bytes, 0).memory, slots.memory)
    sender = _Sender()
    sender.start(await connect(HOST, port, SECRET, timeout=30.0))
    link = await sender.open(transport)
    if way == "raw":
        await _send_raw(sender, backend, slots, count)
    else:
        await sender.sending.send(sender.connection, link, slots, count, max_writes=MAX_WRITES)
    sender.connection.close()
    await sender.closed
    await transport.aclose()
    slots.close()


class _ObservedBackend:
    """Lets the raw transfer use the endpoint of the link."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.name = backend.name
        self.is_reused = backend.is_reused
        self.write_bytes = backend.write_bytes
        self.load = backend.load
        self.endpoint: Any = None

    def create(self, memory: PeerMemory, *, receives: bool) -> Any:
        self.endpoint = self._backend.create(memory, receives=receives)
        return self.endpoint


async def _send_raw(sender: _Sender, backend: Any, slots: Slots, count: int) -> None:
    """Write half of the slots per call, of the credits that the ring has given once."""
    sender.connection.send(Want(ticket_id=TICKET, fragments=1))
    await sender.sending.credit()
    target = msgspec.msgpack.decode(sender.accepted.result())[0]  # address of the landing slots
    memory = slots.memory
    half = memory.num_slots // 2

    def pieces(first: int, number: int) -> Sequence[WritePiece]:
        offsets = [memory.slot_bytes * (first + slot) for slot in range(number)]
        return [WritePiece(memory.address + at, target + at, memory.slot_bytes) for at in offsets]

    def write() -> None:
        left, first = count, 0
        while left:
            number = min(half, left)
            backend.endpoint.write(pieces(first, number), threading.Event())
            left -= number
            first = half - first

    await asyncio.get_running_loop().run_in_executor(slots.threads, write)
    sender.connection.send(Done(ticket_id=TICKET))


# --- idle connections ---------------------------------------------------------------------------


async def _idle(library: str, seconds: float) -> float:
    """Return the CPU share of one idle connection, both of whose ends are on this loop."""
    transports = [OneSidedTransport(_backend(library)) for _ in range(2)]
    size = SIZES["1_mib"]
    slots, none = Slots(size, MEMORY_BYTES // size), Slots(size, 0)
    await transports[0].open(slots.memory, none.memory)
    await transports[1].open(none.memory, slots.memory)
    receiver, sender = _Receiver(transports[0], slots, 1), _Sender()
    listener = await listen(HOST, 0, SECRET, receiver.start)
    sender.start(await connect(HOST, listener.address[1], SECRET, timeout=30.0))
    await sender.open(transports[1])
    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    sender.connection.close()
    await asyncio.gather(sender.closed, receiver.closed)
    for transport in reversed(transports):
        await transport.aclose()
    await listener.aclose()
    slots.close()
    return share


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        print(json.dumps(measure(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        uvloop.run(_send(*json.loads(sys.argv[2])))
