"""Frames: messages with a MAC, and fragments behind them, as bytes. No I/O.

::

    length (31 bits) + flag (1 bit) │ MAC (16 bytes) │ message │ fragment, if the flag is set

Connections over a network have keys, and so a MAC; frames on a Unix socket have none. The MAC is a
keyed blake2b over a counter, the length with its flag, and the message. Both sides count the frames
of a direction: a frame that is changed, repeated, left out or out of order has a wrong MAC, which
ends the connection. The MAC does not cover the fragment: its trailer does.

A reader reads the bytes of a fragment straight into its landing slot. Together with a frame it
reads up to ``AHEAD_BYTES`` of what follows; if these are bytes of a fragment, it copies them.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from aiokv.errors import AiokvError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.wire.messages import Codec

R = TypeVar("R")
H_contra = TypeVar("H_contra", contravariant=True)
MAC_BYTES: Final = 16
AHEAD_BYTES: Final = 4 << 10  # a system call costs more than copying this many bytes
READ_BYTES: Final = 1 << 20  # limit per system call, which blocks the loop while it copies
_DISCARD_BYTES: Final = 64 << 10
_FRAGMENT: Final = 1 << 31
_WORD: Final = struct.Struct("<I")
_COUNTED: Final = struct.Struct("<QI")
HEADER_BYTES: Final = _WORD.size + MAC_BYTES  # header of a frame with a MAC
LENGTH_BYTES: Final = _WORD.size  # header of a frame without a MAC


class ProtocolError(AiokvError):
    """The other side violates the protocol; the connection must end."""


class FragmentHandler(Protocol[H_contra]):
    """Owner of the memory of fragments. Its methods are called from callbacks of the loop."""

    def place(self, head: H_contra, /) -> memoryview | None:
        """Return the memory for the fragment that follows, or None to discard the fragment.

        The memory has exactly ``head.fragment_bytes``. The connection writes it until
        ``on_fragment`` or ``on_closed``, or until ``abort`` returned.
        """

    def on_fragment(self, head: H_contra, /) -> None:
        """Note that all bytes of a fragment have arrived; not called for discarded fragments."""


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
    """Encoder of the frames of one direction of a connection.

    Args:
        key: key of the MACs; None for frames without a MAC.
    """

    def __init__(self, key: bytes | None) -> None:
        self._macs = None if key is None else _Macs(key)

    def frame(self, message: bytes, *, has_fragment: bool = False) -> bytes:
        """Return the next frame, which must be sent before all later ones.

        Args:
            message: encoded message of at most ``Codec.max_message_bytes``.
            has_fragment: a fragment follows.
        """
        word = len(message) | _FRAGMENT if has_fragment else len(message)
        mac = b"" if self._macs is None else self._macs.next(word, message)
        return _WORD.pack(word) + mac + message


class FrameReader:
    """Decoder of the frames of one direction of a connection.

    The caller reads from its socket into ``buffers()``, and then calls ``received``, until
    ``stopped`` is set.

    Args:
        codec: decodes the messages.
        key: key of the MACs; None for frames without a MAC.
        on_message: gets each message without a fragment.
        fragments: gets the fragments; None if there are none.

    Attributes:
        stopped: True if no more callbacks are to be called; set it from a callback.
    """

    def __init__(
        self,
        codec: Codec[Any, Any],
        key: bytes | None,
        on_message: Callable[[Any], None],
        fragments: FragmentHandler[Any] | None = None,
    ) -> None:
        self._codec = codec
        self._max_bytes = codec.max_message_bytes
        self._macs = None if key is None else _Macs(key)
        self._header_bytes = LENGTH_BYTES if key is None else HEADER_BYTES
        self._on_message = on_message
        self._fragments = fragments
        self._small = memoryview(bytearray(AHEAD_BYTES))
        self._buffer = self._small  # a larger one while a long frame is read
        self._begin = 0  # bytes begin:end of the buffer were received and not used yet
        self._end = 0
        self._head: Any = None  # header of the fragment that is being read
        self._rest: memoryview | None = (
            None  # unread rest of the fragment; None while it is discarded
        )
        self._discarding = 0  # number of bytes to discard
        self.stopped = False

    @property
    def fragment_bytes_left(self) -> int:
        """Bytes that the fragment that is being read still needs; 0 between fragments."""
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
            ProtocolError: the peer violates the protocol. The reader must not be used any more.
        """
        if self._rest is not None:
            taken = min(num_bytes, len(self._rest))
            self._rest = self._rest[taken:]
            self._end += num_bytes - taken
            if self._rest:
                return
            self._end_fragment()
        elif self._discarding:
            self._discarding -= num_bytes
        else:
            self._end += num_bytes
        self._take_frames()

    def stop(self) -> None:
        """Call no more callbacks, and keep no memory of a fragment."""
        self.stopped = True
        self._rest = None
        self._head = None

    def _take_frames(self) -> None:
        while not self.stopped and self._rest is None and not self._discarding:
            if not self._take_frame():
                return

    def _take_frame(self) -> bool:
        """Take one frame; False if it has not arrived whole."""
        available = self._end - self._begin
        if available < self._header_bytes:
            self._make_room(self._header_bytes)
            return False
        (word,) = _WORD.unpack_from(self._buffer, self._begin)
        length = word & ~_FRAGMENT
        if length > self._max_bytes:
            raise too_long(length, self._codec)
        if available < self._header_bytes + length:
            self._make_room(self._header_bytes + length)
            return False
        body_at = self._begin + self._header_bytes
        body = self._buffer[body_at : body_at + length]
        if self._macs is not None:
            mac = bytes(self._buffer[self._begin + _WORD.size : body_at])
            if not hmac.compare_digest(mac, self._macs.next(word, body)):
                raise ProtocolError("a frame with a wrong MAC")
        message = decoded(self._codec, body)
        self._begin = body_at + length
        if word & _FRAGMENT:
            self._begin_fragment(message)
        else:
            self._on_message(message)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Move the bytes of a frame to the start of a buffer that can hold all of it."""
        rest = self._buffer[self._begin : self._end]
        size = max(num_bytes, AHEAD_BYTES)
        if size > len(self._buffer) or (size < len(self._buffer) and len(rest) <= size):
            buffer = self._small if size == AHEAD_BYTES else memoryview(bytearray(size))
            buffer[: len(rest)] = rest
            self._buffer = buffer
        elif self._begin:
            self._buffer[: len(rest)] = bytes(rest)
        self._begin, self._end = 0, len(rest)

    def _begin_fragment(self, message: Any) -> None:
        head, fragments = self._codec.head, self._fragments
        if head is None or fragments is None or not isinstance(message, head):
            raise ProtocolError(f"a fragment behind the message {type(message).__name__}")
        target = fragments.place(message)
        if self.stopped:
            return
        ahead = min(self._end - self._begin, message.fragment_bytes)
        if target is None:
            self._discarding = message.fragment_bytes - ahead
        else:
            if len(target) != message.fragment_bytes:
                raise InternalError(
                    f"place returned {len(target)} bytes for a fragment of {message.fragment_bytes}"
                )
            target[:ahead] = self._buffer[self._begin : self._begin + ahead]
            self._head = message
            self._rest = target[ahead:]
        self._begin += ahead
        if target is not None and ahead == message.fragment_bytes:
            self._end_fragment()
        elif ahead < message.fragment_bytes:  # all received bytes are used
            self._buffer, self._begin, self._end = self._small, 0, 0

    def _end_fragment(self) -> None:
        head, self._head, self._rest = self._head, None, None
        if head is not None and self._fragments is not None:
            self._fragments.on_fragment(head)


def too_long(length: int, codec: Codec[Any, Any]) -> ProtocolError:
    """Return the error of a message that is longer than its codec allows."""
    return ProtocolError(
        f"a message of {length} bytes; the limit is {codec.max_message_bytes} bytes"
    )


def decoded(codec: Codec[Any, R], body: memoryview) -> R:
    """Return the message with these bytes.

    Raises:
        ProtocolError: it is malformed, or nested too deeply.
    """
    try:
        return codec.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a malformed message: {error}") from None
    except RecursionError:  # msgspec limits the nesting of values that it decodes or skips
        raise ProtocolError("a message that is nested too deeply") from None
