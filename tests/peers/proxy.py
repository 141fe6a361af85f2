"""A TCP proxy between two engines, which cuts, delays, changes, repeats and reorders frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

import msgspec

from aiokv.peers import ticket as tickets
from aiokv.peers.handshake import GREETING_BYTES, PROOF_BYTES
from aiokv.peers.messages import Landed, decode
from aiokv.wire.frames import HEADER_BYTES
from tests.peers.engines import KEY

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

Fault = Literal[
    "none",
    "cut",  # before the unit
    "cut inside",  # in the middle of it
    "flip",  # a bit of a frame or a fragment
    "replay",  # send it twice
    "swap",  # with the next unit
    "drop",
    "stall",  # forward nothing more in this direction, and keep the connection open
    "trickle",  # forward it in small pieces
]
FAULTS: Final[tuple[Fault, ...]] = Fault.__args__  # type: ignore[attr-defined]
_FRAGMENT: Final = 1 << 31
_READ_BYTES: Final = 64 << 10


class Unit(NamedTuple):
    """Bytes that belong together: a handshake message, a frame, or a fragment.

    Attributes:
        kind: of the unit.
        data: its bytes.
        to_server: True in the direction from the sender of blocks to the receiver.
    """

    kind: Literal["handshake", "frame", "fragment"]
    data: bytes
    to_server: bool


class _Units:
    """Takes the bytes of one direction apart."""

    def __init__(self, *, to_server: bool) -> None:
        self._to_server = to_server
        self._bytes = bytearray()
        self._next: list[tuple[str, int]] = [
            ("handshake", GREETING_BYTES),
            ("handshake", PROOF_BYTES),
        ]

    def take(self, data: bytes) -> list[Unit]:
        """Return the units that are complete now."""
        self._bytes += data
        units = []
        while (unit := self._unit()) is not None:
            units.append(unit)
        return units

    def _unit(self) -> Unit | None:
        kind, length = self._next[0] if self._next else ("frame", HEADER_BYTES)
        if kind == "frame":
            if len(self._bytes) < HEADER_BYTES:
                return None
            (word,) = struct.unpack_from("<I", self._bytes)
            length = HEADER_BYTES + (word & ~_FRAGMENT)
        if len(self._bytes) < length:
            return None
        data = bytes(self._bytes[:length])
        del self._bytes[:length]
        if self._next:
            self._next.pop(0)
        if kind == "frame" and word & _FRAGMENT:
            landed = decode(memoryview(data)[HEADER_BYTES:])
            assert isinstance(landed, Landed)
            self._next.append(("fragment", landed.fragment_bytes))
        return Unit(kind, data, self._to_server)  # type: ignore[arg-type]


class Proxy:
    """Forwards connections to a port of this machine.

    Args:
        port: of the receiving engine.
        fault: returns the fault of each unit.
        rng: chooses the byte that is changed, and where a connection is cut.

    Attributes:
        faults: units that were not forwarded as they were, by fault.
    """

    def __init__(self, port: int, fault: Callable[[Unit], Fault], rng: random.Random) -> None:
        self._target = port
        self._fault = fault
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening = socket.socket()
        self._open: set[socket.socket] = set()
        self.faults: dict[Fault, int] = {}

    async def __aenter__(self) -> Self:
        self._listening.setblocking(False)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(64)
        self._spawn(self._accept())
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for end in (self._listening, *self._open):  # of tasks that had not begun, too
            end.close()

    def via(self, blob: bytes) -> bytes:
        """Return a ticket whose endpoints are this proxy."""
        ticket = tickets.decode(blob, KEY)
        port = self._listening.getsockname()[1]
        endpoints = [msgspec.structs.replace(e, port=port) for e in ticket.endpoints]
        return tickets.encode(msgspec.structs.replace(ticket, endpoints=endpoints), KEY)

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            accepted, _ = await loop.sock_accept(self._listening)
            self._open.add(accepted)
            self._spawn(self._serve(accepted))

    async def _serve(self, client: socket.socket) -> None:
        """Forward one connection until one of its ends is cut."""
        loop = asyncio.get_running_loop()
        server = socket.socket()
        self._open.add(server)
        pumps: list[asyncio.Task[None]] = []
        try:
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(server, ("127.0.0.1", self._target))
            pumps = [
                loop.create_task(self._pump(client, server, _Units(to_server=True))),
                loop.create_task(self._pump(server, client, _Units(to_server=False))),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except ConnectionError:
            return
        finally:
            for pump in pumps:
                pump.cancel()
            if pumps:
                await asyncio.wait(pumps)
            for end in (client, server):
                end.close()
            self._open -= {client, server}

    async def _pump(self, source: socket.socket, target: socket.socket, units: _Units) -> None:
        """Forward one direction; return when the connection is to be cut."""
        loop = asyncio.get_running_loop()
        held: bytes = b""
        stalled = False
        try:
            while data := await loop.sock_recv(source, _READ_BYTES):
                for unit in units.take(data):
                    fault: Fault = "stall" if stalled else self._fault(unit)
                    if fault != "none":
                        self.faults[fault] = self.faults.get(fault, 0) + 1
                    stalled = fault == "stall"
                    if fault == "cut":
                        return
                    if fault == "cut inside":
                        await loop.sock_sendall(target, unit.data[: self._place(unit)])
                        return
                    if fault in ("drop", "stall"):
                        continue
                    if fault == "swap" and not held:
                        held = unit.data
                        continue
                    data, held = unit.data + held, b""
                    if fault == "flip":
                        changed = bytearray(data)
                        changed[self._place(unit)] ^= 1 << self._rng.randrange(8)
                        data = bytes(changed)
                    elif fault == "replay":
                        data += data
                    step = max(len(data) // 7, 1) if fault == "trickle" else len(data)
                    for at in range(0, len(data), step):
                        await loop.sock_sendall(target, data[at : at + step])
        except ConnectionError:
            return

    def _place(self, unit: Unit) -> int:
        return self._rng.randrange(len(unit.data))
