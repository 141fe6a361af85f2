"""Messages between the front of the split demo and its servers, over Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base.types import Item  # noqa: TC001  (msgspec)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_LENGTH_BYTES: Final = 4


class Serve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a server: compute a request.

    Attributes:
        name: of the request.
        tokens: the prompt.
        stop_length: number of prompt and output tokens.
        items: images in the prompt.
        arrived_seconds: ``time.perf_counter()`` at which the user sent it; processes of one host
            have the same clock.
        ticket: for the prefill server, of the decode server.
        has_prefill: for the decode server; False when it has to compute the prompt itself.
    """

    name: str
    tokens: list[int]
    stop_length: int
    items: tuple[Item, ...]
    arrived_seconds: float
    ticket: bytes = b""
    has_prefill: bool = True


class WouldHit(msgspec.Struct, frozen=True, tag=True):
    """To a decode server: the number of leading tokens that it holds is asked for."""

    name: str
    tokens: list[int]
    items: tuple[Item, ...]


class Held(msgspec.Struct, frozen=True, tag=True):
    """From a decode server: the number of leading tokens of a prompt that it holds."""

    name: str
    tokens: int


class NotPrefilled(msgspec.Struct, frozen=True, tag=True):
    """To the decode server: no server computes the prompt of a request; and to the front."""

    name: str


class NeedsPrefill(msgspec.Struct, frozen=True, tag=True):
    """From the decode server: it waits for the blocks of a prompt."""

    name: str
    ticket: bytes


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """From the decode server: the first blocks of a prompt have arrived."""

    name: str
    tokens: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """From the prefill server: the first output token."""

    name: str
    token: int


class Served(msgspec.Struct, frozen=True, tag=True):
    """From the decode server: all output tokens, and seconds until it had computed the first."""

    name: str
    tokens: list[int]
    first_token_seconds: float


Message = Serve | WouldHit | Held | NotPrefilled | NeedsPrefill | Arrived | FirstToken | Served

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Channel:
    """Sends and receives messages in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        """Send a message; to a process that has ended, do nothing."""
        if self._writer.is_closing():
            return  # uvloop raises RuntimeError here
        blob = _encode(message)
        self._writer.write(len(blob).to_bytes(_LENGTH_BYTES) + blob)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield the messages of the other side until it closes the channel or ends."""
        while True:
            try:
                header = await self._reader.readexactly(_LENGTH_BYTES)
                yield _decode(await self._reader.readexactly(int.from_bytes(header)))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def aclose(self) -> None:
        """Send what was written, then the end of the channel. Idempotent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
