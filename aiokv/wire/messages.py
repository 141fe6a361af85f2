"""Keepalive messages, and the codec of the messages that the users of a connection define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from aiokv.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")
R = TypeVar("R")


class _Message(
    msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True
):
    """Message, encoded as an array that begins with a tag; never pickled."""


class Ping(_Message, frozen=True, tag="ping"):
    """Ask for a ``Pong``; sent and answered by the :class:`Connection`."""


class Pong(_Message, frozen=True, tag="pong"):
    """Answer to a ``Ping``: the loop of the other side runs."""


encode: Final = msgspec.msgpack.Encoder().encode
PING: Final = encode(Ping())
PONG: Final = encode(Pong())


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(Generic[S, R]):
    """Messages of one side of a connection.

    Attributes:
        encode: returns the bytes of a message that this side sends, of any length.
        decode: returns a message of the other side. The union that it accepts has ``Ping`` and
            ``Pong``; it raises a ``msgspec.MsgspecError`` for anything else.
        max_message_bytes: a longer message, in either direction, is refused.
        head: class of the messages that fragments follow, with a number ``fragment_bytes``; None if
            there are no fragments.
    """

    encode: Callable[[S], bytes]
    decode: Callable[[memoryview], R]
    max_message_bytes: int
    head: type[Any] | None = None

    def encoded(self, message: S) -> bytes:
        """Return the bytes of a message.

        Raises:
            InternalError: the message is longer than the other side accepts.
        """
        encoded = self.encode(message)
        if len(encoded) > self.max_message_bytes:
            raise InternalError(
                f"a message of {len(encoded)} bytes; the limit is {self.max_message_bytes} bytes"
            )
        return encoded
