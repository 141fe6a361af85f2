"""Connections of tests: a recording handler, a connected pair, and raw sockets."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokv.peers.handshake import GREETING_BYTES, PROOF_BYTES, Handshake
from aiokv.peers.messages import Done, Landed, Want
from aiokv.peers.wire import Connection, connect, listen
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from aiokv.wire.connection import WireLimits
from aiokv.wire.frames import FrameWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiokv.peers.messages import Message
    from aiokv.wire.listener import Listener

HOST = "127.0.0.1"
SECRET = b"a secret of at least 16 bytes"
TICKET = b"a ticket, 16 b.."
WANT = Want(ticket_id=TICKET, fragments=1)
DONE = Done(ticket_id=TICKET)


def landed(fragment_bytes: int, slot: int = 0, block: int = 0) -> Landed:
    return Landed(
        ticket_id=TICKET,
        sender_block=block,
        slot=slot,
        slot_generation=1,
        fragment_bytes=fragment_bytes,
    )


async def listening(accepted: list[Connection], **limits: object) -> Listener:
    """Listen with some limits changed; connections are appended to ``accepted``."""
    return await listen(HOST, 0, SECRET, accepted.append, limits=WireLimits(**limits))


class Recorder:
    """Handler that keeps all that it gets."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.places: list[tuple[Landed, bytearray]] = []
        self.fragments: list[tuple[Landed, bytes]] = []
        self.closed: list[str] = []
        self.discards = False
        self.at_message: Callable[[Message], object] = lambda message: None
        self.at_place: Callable[[Landed], object] = lambda message: None
        self.at_fragment: Callable[[Landed], object] = lambda message: None

    def on_message(self, message: Message) -> None:
        self.messages.append(message)
        self.at_message(message)

    def place(self, message: Landed) -> memoryview | None:
        self.at_place(message)
        if self.discards:
            return None
        self.places.append((message, bytearray(message.fragment_bytes)))
        return memoryview(self.places[-1][1])

    def on_fragment(self, message: Landed) -> None:
        assert message is self.places[-1][0]
        self.fragments.append((message, bytes(self.places[-1][1])))
        self.at_fragment(message)

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)


class Pair:
    """Both ends of a connection.

    Attributes:
        client: opened the connection.
        server: was accepted.
    """

    def __init__(self, listener: Listener, accepted: list[Connection], client: Connection) -> None:
        self.listener = listener
        self.accepted = accepted
        self.client = client
        self.server = accepted[0]
        self.at_client = Recorder()
        self.at_server = Recorder()

    def start(self) -> None:
        self.client.start(self.at_client)
        self.server.start(self.at_server)

    def shrink_buffers(self) -> None:
        """Let the kernel keep fewer bytes of the connection than a fragment has."""
        for end in (self.client, self.server):
            end._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)


@asynccontextmanager
async def connected(limits: WireLimits = WireLimits()) -> AsyncIterator[Pair]:  # noqa: B008
    """Both ends of a connection, closed afterwards."""
    accepted: list[Connection] = []
    listener = await listen(HOST, 0, SECRET, accepted.append, limits=limits)
    client = await connect(
        HOST, listener.address[1], SECRET, timeout=PATIENCE_SECONDS, limits=limits
    )
    await run_until_idle(lambda: bool(accepted))
    pair = Pair(listener, accepted, client)
    try:
        yield pair
    finally:
        for end in (pair.client, *accepted):
            end.abort("the test ended")
        await listener.aclose()


class RawSocket:
    """A socket of the test, which sends any bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.setblocking(False)
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def to(cls, port: int) -> RawSocket:
        raw = cls(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        await raw.loop.sock_connect(raw.socket, (HOST, port))
        return raw

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.socket, data)

    async def receive(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = await self.loop.sock_recv(self.socket, num_bytes - len(data))
            if not part:
                break
            data += part
        return data

    async def receive_all(self) -> bytes:
        """Return what arrives until the other side closes the connection."""
        data = b""
        try:
            while part := await self.loop.sock_recv(self.socket, 65536):
                data += part
        except ConnectionResetError:
            return data
        return data

    async def shake_hands(self, secret: bytes = SECRET) -> FrameWriter:
        """Authenticate as a client; return the writer of frames."""
        handshake = Handshake(secret, "client")
        await self.send(handshake.greeting)
        handshake.read_greeting(await self.receive(GREETING_BYTES))
        await self.send(handshake.proof())
        handshake.check_proof(await self.receive(PROOF_BYTES))
        return FrameWriter(handshake.keys().sending)

    def close(self) -> None:
        self.socket.close()
