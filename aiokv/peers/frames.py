"""Frames: messages with a MAC, and parcels behind them, as bytes. No I/O.

::

    length (31 bits) + flag (1 bit) │ MAC (16 bytes) │ message │ parcel, if the flag is set

The MAC is a keyed blake2b over a counter, the length with its flag, and the message. Both sides
count the frames of a direction: a frame that is changed, repeated, left out or out of order has a
wrong MAC, which ends the connection. The MAC does not cover the parcel: its trailer does.

A reader reads the bytes of a parcel straight into its landing slot. Together with a frame it reads
up to ``AHEAD_BYTES`` of what follows; if these are bytes of a parcel, it copies them.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.errors import InternalError
from aiokv.peers.messages import Landed, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.peers.messages import Message

MAX_FRAME_BYTES: Final = 256 << 10  # of a message
MAC_BYTES: Final = 16
AHEAD_BYTES: Final = 4 << 10  # a system call costs more than the copy of as many bytes
READ_BYTES: Final = 1 << 20  # of one system call, which holds the loop while it copies
_DISCARD_BYTES: Final = 64 << 10
_PARCEL: Final = 1 << 31
_WORD: Final = struct.Struct("<I")
_COUNTED: Final = struct.Struct("<QI")
HEADER_BYTES: Final = _WORD.size + MAC_BYTES


class FrameError(Exception):
    """The peer violates the protocol; the connection must end."""


class _Macs:
    """MACs of the frames of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=MAC_BYTES, person=b"aiokv frame")
        self._count = 0

    def next(self, word: int, body: bytes | memoryview) -> bytes:
        """Return the MAC of the next frame."""
        mac = self._keyed.copy()
        mac.update(_COUNTED.pack(self._count, word))
        mac.update(body)
        self._count += 1
        return mac.digest()


class FrameWriter:
    """Makes the frames of one direction of a connection.

    Args:
        key: of this direction.
    """

    def __init__(self, key: bytes) -> None:
        self._macs = _Macs(key)

    def frame(self, message: Message, *, has_parcel: bool = False) -> bytes:
        """Return the next frame, which must be sent before all later ones.

        Args:
            message: a ``Landed`` if ``has_parcel``.
            has_parcel: ``message.parcel_bytes`` bytes follow.

        Raises:
            InternalError: the message is longer than the other side accepts.
        """
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise InternalError(
                f"a message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES} bytes"
            )
        word = len(body) | _PARCEL if has_parcel else len(body)
        return _WORD.pack(word) + self._macs.next(word, body) + body


class FrameReader:
    """Takes the frames of one direction of a connection apart.

    The caller reads from its socket into ``buffers()``, and then calls ``received``, until
    ``stopped`` is set.

    Args:
        key: of this direction.
        on_message: gets each message without a parcel.
        place: returns the memory for the parcel of a ``Landed``, of exactly ``parcel_bytes``, or
            None to discard the parcel.
        on_parcel: gets the ``Landed`` of a parcel when all its bytes are in their place; not called
            for a discarded parcel.

    Attributes:
        stopped: no more callbacks are called; set it from a callback.
    """

    def __init__(
        self,
        key: bytes,
        on_message: Callable[[Message], None],
        place: Callable[[Landed], memoryview | None],
        on_parcel: Callable[[Landed], None],
    ) -> None:
        self._macs = _Macs(key)
        self._on_message = on_message
        self._place = place
        self._on_parcel = on_parcel
        self._small = memoryview(bytearray(AHEAD_BYTES))
        self._buffer = self._small  # a larger one while a long frame is read
        self._begin = 0  # bytes begin:end of the buffer were received and not used yet
        self._end = 0
        self._landed: Landed | None = None  # its parcel is being read, or discarded
        self._rest: memoryview | None = None  # of the parcel; None while it is discarded
        self._discarding = 0  # bytes
        self.stopped = False

    @property
    def parcel_bytes_left(self) -> int:
        """Bytes that the parcel that is being read still needs; 0 between parcels."""
        return len(self._rest) if self._rest is not None else self._discarding

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes belong, in order; never empty, and at most ``READ_BYTES``."""
        if self._rest is not None:
            if len(self._rest) > READ_BYTES:
                return [self._rest[:READ_BYTES]]
            return [self._rest, self._buffer]
        if self._discarding:
            return [memoryview(bytearray(min(self._discarding, _DISCARD_BYTES)))]
        return [self._buffer[self._end :]]

    def received(self, num_bytes: int) -> None:
        """Take ``num_bytes`` that were read into ``buffers()``, and call the callbacks.

        Raises:
            FrameError: the peer violates the protocol. The reader must not be used any more.
        """
        if self._rest is not None:
            taken = min(num_bytes, len(self._rest))
            self._rest = self._rest[taken:]
            self._end += num_bytes - taken
            if self._rest:
                return
            self._end_parcel()
        elif self._discarding:
            self._discarding -= num_bytes
        else:
            self._end += num_bytes
        self._take_frames()

    def stop(self) -> None:
        """Call no more callbacks, and keep no memory of a parcel."""
        self.stopped = True
        self._rest = None
        self._landed = None

    def _take_frames(self) -> None:
        while not self.stopped and self._rest is None and not self._discarding:
            if not self._take_frame():
                return

    def _take_frame(self) -> bool:
        """Take one frame; False if it has not arrived whole."""
        available = self._end - self._begin
        if available < HEADER_BYTES:
            self._make_room(HEADER_BYTES)
            return False
        (word,) = _WORD.unpack_from(self._buffer, self._begin)
        length = word & ~_PARCEL
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a message of {length} bytes; the limit is {MAX_FRAME_BYTES} bytes")
        if available < HEADER_BYTES + length:
            self._make_room(HEADER_BYTES + length)
            return False
        body_at = self._begin + HEADER_BYTES
        body = self._buffer[body_at : body_at + length]
        mac = bytes(self._buffer[self._begin + _WORD.size : body_at])
        if not hmac.compare_digest(mac, self._macs.next(word, body)):
            raise FrameError("a frame with a wrong MAC")
        message = _decoded(body)
        self._begin = body_at + length
        if word & _PARCEL:
            self._begin_parcel(message)
        else:
            self._on_message(message)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Move the bytes of a frame to the begin of a buffer that can hold all of it."""
        rest = self._buffer[self._begin : self._end]
        size = max(num_bytes, AHEAD_BYTES)
        if size > len(self._buffer) or (size < len(self._buffer) and len(rest) <= size):
            buffer = self._small if size == AHEAD_BYTES else memoryview(bytearray(size))
            buffer[: len(rest)] = rest
            self._buffer = buffer
        elif self._begin:
            self._buffer[: len(rest)] = bytes(rest)
        self._begin, self._end = 0, len(rest)

    def _begin_parcel(self, message: Message) -> None:
        if not isinstance(message, Landed):
            raise FrameError(f"a parcel behind the message {type(message).__name__}")
        target = self._place(message)
        if self.stopped:
            return
        ahead = min(self._end - self._begin, message.parcel_bytes)
        if target is None:
            self._discarding = message.parcel_bytes - ahead
        else:
            if len(target) != message.parcel_bytes:
                raise InternalError(
                    f"place returned {len(target)} bytes for a parcel of {message.parcel_bytes}"
                )
            target[:ahead] = self._buffer[self._begin : self._begin + ahead]
            self._landed = message
            self._rest = target[ahead:]
        self._begin += ahead
        if target is not None and ahead == message.parcel_bytes:
            self._end_parcel()
        elif ahead < message.parcel_bytes:  # all that was received is used
            self._buffer, self._begin, self._end = self._small, 0, 0

    def _end_parcel(self) -> None:
        landed, self._landed, self._rest = self._landed, None, None
        if landed is not None:
            self._on_parcel(landed)


def _decoded(body: memoryview) -> Message:
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"a malformed message: {error}") from None
    except RecursionError:  # msgspec counts the nesting of what it decodes or skips
        raise FrameError("a message that is nested too deeply") from None
