"""Raw bytes on the sockets of ranks: clients that violate the protocol, and ranks that hang."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokv.testing import run_until_idle
from aiokv.wire.frames import LENGTH_BYTES, FrameWriter

if TYPE_CHECKING:
    from aiokv.wire.connection import Connection
    from tests.ranks.loopback import Ranked


def frame_of(message: bytes) -> bytes:
    """Return an encoded message as a frame."""
    return FrameWriter(None).frame(message)


def send_raw(connection: Connection[Any, Any], data: bytes) -> None:
    """Send bytes behind those that the connection has sent."""
    assert connection._socket.send(data) == len(data)


def pause(connection: Connection[Any, Any]) -> None:
    """Let the process of this end read nothing more, as if it hangs."""
    asyncio.get_running_loop().remove_reader(connection._socket)


def resume(connection: Connection[Any, Any]) -> None:
    """End a ``pause``."""
    asyncio.get_running_loop().add_reader(connection._socket, connection._on_readable)


class Peer(asyncio.Protocol):
    """A raw connection to a group.

    Attributes:
        received: messages, without their frames.
        closed: the connection has ended.
    """

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.closed = False
        self._buffer = b""
        self._transport: Any = None

    async def connect(self, ranked: Ranked) -> Peer:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, str(ranked.group.path))
        return self

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def hang_up(self) -> None:
        self._transport.close()

    async def ended(self) -> None:
        await run_until_idle(lambda: self.closed)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if len(self._buffer) < end:
                return
            self.received.append(self._buffer[LENGTH_BYTES:end])
            self._buffer = self._buffer[end:]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
