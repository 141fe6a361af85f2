"""Connection: one end of a connection between two processes of aiokv.

Peers connect over TCP, ranks and their manager over a Unix socket. A connection exists only after
its two sides have authenticated each other. Each end has one owner, a :class:`Handler`, which gets
the messages in callbacks of the loop.

The socket is read and written in callbacks of the loop, without a task per connection and without
asyncio's transports: bytes of fragments go from their memory to the kernel, and from the kernel to
their memory, without a copy in between. One callback moves at most ``READ_BYTES`` or
``WRITE_BYTES``.

Liveness, once ``watch`` was called: a connection that received nothing for ``ping_seconds`` asks
with a ``Ping``; one that received nothing for ``silent_pings`` of these intervals is cut, and so is
one whose other side does not read. Intervals are counted, so that a loop that was blocked cuts no
connection.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from aiokv.base.checks import Unique, integer, positive
from aiokv.errors import ConfigError, InternalError, PeerError
from aiokv.wire.frames import READ_BYTES, FragmentHandler, FrameReader, ProtocolError
from aiokv.wire.messages import PING, PONG, Ping, Pong
from aiokv.wire.write_queue import FragmentWrites, WriteQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.wire.messages import Codec

CALL_BYTES: Final = 16 << 10  # cost of a system call and its frames, in bytes of READ_BYTES
WAKE_BYTES: Final = 512 << 10  # bytes of a fragment; a lower value wakes the loop too often
MAX_QUEUED: Final = 1 << 16  # messages that the other side has not read

S = TypeVar("S")
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
H = TypeVar("H")


class SessionKeys(NamedTuple):
    """Keys of the frames of one connection, 32 bytes each."""

    sending: bytes
    receiving: bytes

    def __repr__(self) -> str:
        return "SessionKeys(...)"


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a listener and of its connections, or of an opened connection.

    Attributes:
        handshake_seconds: from the accepted socket to the last proof.
        max_unauthenticated: sockets in a handshake; a further one ends the oldest.
        max_connections: authenticated connections of a listener; further ones are refused.
        ping_seconds: interval of the checks of a connection.
        silent_pings: intervals without a byte from the other side, after which the connection is
            cut; likewise intervals in which it reads nothing although bytes wait for it.
    """

    handshake_seconds: float = 5.0
    max_unauthenticated: int = 64
    max_connections: int = 1024
    ping_seconds: float = 2.0
    silent_pings: int = 3

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is of the wrong type or out of range.
        """
        for name in ("handshake_seconds", "ping_seconds"):
            positive(name, getattr(self, name), ConfigError)
        for name in ("max_unauthenticated", "max_connections", "silent_pings"):
            integer(name, getattr(self, name), minimum=1, error=ConfigError)


class Handler(Protocol[R_contra]):
    """Owner of one end of a connection. All methods are called from callbacks of the loop.

    An exception of a method cuts the connection. A ``ProtocolError`` names the other side's fault;
    any other exception is reported to the loop.
    """

    def on_message(self, message: R_contra, /) -> None:
        """Take a message, other than ``Ping`` and ``Pong``, that no fragment follows."""

    def on_closed(self, reason: str) -> None:
        """Note the end of the connection: it neither reads nor writes any more.

        Called once, and never from inside a call of the owner.
        """


@dataclass(frozen=True, slots=True)
class Callbacks(Generic[R]):
    """A :class:`Handler` made of two functions."""

    on_message: Callable[[R], None]
    on_closed: Callable[[str], None]


class Connection(Unique, Generic[S, R]):
    """One end of an authenticated connection. Used on one loop; nothing is read before ``start``.

    Args:
        connected: non-blocking socket; the connection closes it.
        remote: name of the other end, for error and log messages.
        codec: encodes and decodes the messages of this end.
        keys: keys for the MACs of frames; None for frames without a MAC.

    Attributes:
        remote: name of the other end, for error and log messages.
        reason: why the connection ended; empty while it is open.
        timed_out: True if it was cut because the other side was silent, or did not read.
        sent_bytes: frames and fragments that the kernel took.
        received_bytes: frames and fragments that arrived.
    """

    def __init__(
        self,
        connected: socket.socket,
        remote: str,
        codec: Codec[S, R],
        keys: SessionKeys | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._codec = codec
        self._encoded = codec.encoded
        self._receiving_key = None if keys is None else keys.receiving
        self._limits: WireLimits | None = None
        self._handler: Handler[R] | None = None
        self._reader: FrameReader | None = None
        self._queue = WriteQueue(None if keys is None else keys.sending)
        self._flush_scheduled = False
        self._writer_armed = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_bytes = 1  # received bytes that make the socket readable
        self._received = False  # True if a byte was received since the last check
        self._sent = False  # True if a byte was sent since the last check
        self._silent = 0  # checks since the last byte was received
        self._stuck = 0  # checks since the last byte was sent, while bytes waited
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._holds = 0  # users that keep the socket open after the connection's end
        self.remote = remote
        self.reason = ""
        self.timed_out = False
        self.sent_bytes = 0
        self.received_bytes = 0

    def __repr__(self) -> str:
        state = f"ended: {self.reason}" if self.reason else "open"
        return f"<Connection {self.remote}, {state}>"

    def start(self, handler: Handler[R]) -> None:
        """Begin to deliver messages. Called once.

        Args:
            handler: gets the messages, and ``on_closed``, also if the connection has ended already.
                With ``Codec.head``, it must be a ``FragmentHandler``, too.
        """
        self._handler = handler
        if self.reason:
            self._loop.call_soon(self._tell_closed)
            return
        fragments = None if self._codec.head is None else cast("FragmentHandler[Any]", handler)
        self._reader = FrameReader(self._codec, self._receiving_key, self._on_message, fragments)
        self._loop.add_reader(self._socket, self._on_readable)
        if self._limits is not None:
            self.watch(self._limits)

    def watch(self, limits: WireLimits) -> None:
        """After ``start``, cut the connection when the other side is silent or does not read.

        Args:
            limits: intervals of silence after which the connection is cut.
        """
        self._limits = limits
        if self._reader is not None and self._timer is None:
            self._timer = self._loop.call_later(limits.ping_seconds, self._check)

    def send(self, message: S) -> None:
        """Queue a message; without effect on a connection that has ended.

        Messages and fragments arrive in the order of the calls.

        Raises:
            InternalError: the message is longer than the other side accepts.
        """
        if self.reason or self._closing:
            return
        self._queue.add(self._encoded(message))
        self._queue_changed()

    def send_encoded(self, message: bytes) -> None:
        """Queue a message that ``Codec.encoded`` has returned; see ``send``."""
        if self.reason or self._closing:
            return
        self._queue.add(message)
        self._queue_changed()

    def write(self, fragments: Iterable[tuple[H, memoryview]]) -> FragmentWrites[H]:
        """Queue fragments, each behind its message, of the class ``Codec.head``.

        Args:
            fragments: each memory has ``fragment_bytes``. The connection reads it until ``ended``
                of the result, or until the fragment was withdrawn.
        """
        batch: list[tuple[Any, memoryview]] = list(fragments)
        writes: FragmentWrites[H] = FragmentWrites([head for head, _ in batch])
        for head, fragment in batch:
            if len(fragment) != head.fragment_bytes:
                raise InternalError(
                    f"{len(fragment)} bytes for a fragment of {head.fragment_bytes}"
                )
        if self.reason or self._closing:
            writes.fail(self.reason or "the connection is being closed")
            return writes
        self._queue.add_fragments(
            [(self._encoded(head), fragment) for head, fragment in batch], writes
        )
        self._queue_changed()
        return writes

    def close(self) -> None:
        """Deliver no more messages; end the connection when all queued bytes are sent. Idempotent.

        If the other side does not read, the connection is cut, as while it is open.
        """
        if self.reason or self._closing:
            return
        self._closing = True
        if self._reader is not None:
            self._reader.stop()
        self._loop.remove_reader(self._socket)
        self._end_if_sent()

    def abort(self, reason: str) -> None:
        """End the connection now; the first reason is kept.

        When it returns, the connection accesses no memory of fragments.
        """
        if self.reason:
            return
        self._loop.call_soon(self._tell_closed)
        self.reason = reason or "aborted"
        self._stop()

    def _stop(self) -> None:
        """Access no memory of fragments any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if not self._holds:
            self._close_socket()
        self._queue.fail(self.reason)
        self._closed.set_result(self.reason)

    def _tell_closed(self) -> None:
        """Tell the handler that the connection has ended."""
        if self._handler is not None:
            self._handler.on_closed(self.reason)
        self._handler = None  # breaks the cycle with the handler, so both are freed at once

    async def closed(self) -> str:
        """Wait for the end of the connection; return the reason.

        Cancellation: stops waiting.
        """
        return await asyncio.shield(self._closed)

    # --- the socket after the end, for one-sided transports ---------------------------------------

    def hold(self) -> None:
        """Keep the socket open after the end of the connection, until ``unhold``.

        A sender holds its connection while it may write into the memory of the receiver: the
        kernel then tells the receiver when no write can follow (``peer_ended``), also when the
        process of the sender was killed.
        """
        self._holds += 1

    def unhold(self) -> None:
        """End one ``hold``; the last one closes the socket if the connection has ended."""
        self._holds -= 1
        if self.reason and not self._holds:
            self._close_socket()

    async def peer_ended(self) -> None:
        """Wait until the peer has closed its socket, or its process has ended.

        Called after the end of this connection, between ``hold`` and ``unhold``. A running peer is
        told of the end.

        Raises:
            PeerError: the connection failed in another way, so the peer may still run.

        Cancellation: stops waiting; call it again.
        """
        if not self.reason or not self._holds:
            raise InternalError(f"peer_ended: called for {self.remote}, which is open or not held")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0)  # uvloop stops watching a descriptor one pass later
        ignored = bytearray(READ_BYTES)
        try:
            while await self._loop.sock_recv_into(self._socket, ignored):
                continue
        except ConnectionError:
            return
        except OSError as error:
            raise PeerError(f"{self.remote}: {error}") from error

    def _close_socket(self) -> None:
        # uvloop stops watching a descriptor one pass later.
        self._loop.call_soon(self._socket.close)

    # --- reading ----------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        reader = self._reader
        if reader is None or reader.stopped:
            return
        try:
            budget = READ_BYTES
            while budget > 0 and (num_bytes := self._read(reader)):
                budget -= num_bytes + CALL_BYTES
        except ProtocolError as error:
            self.abort(f"protocol: {error}")
        except BaseException as error:
            self.abort(f"an internal error: {error!r}")
            raise
        if not self.reason:
            self._wake_after(max(1, min(reader.fragment_bytes_left, WAKE_BYTES)))

    def _read(self, reader: FrameReader) -> int:
        """Read once; return the number of bytes, or 0 if there are probably no more of them."""
        buffers = reader.buffers()
        wanted = sum(map(len, buffers))
        try:
            num_bytes = self._socket.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.abort(f"the connection was lost: {error}")
            return 0
        if not num_bytes:
            self.abort("the other side closed the connection")
            return 0
        self._received = True
        self.received_bytes += num_bytes
        reader.received(num_bytes)
        return num_bytes if num_bytes == wanted and not reader.stopped else 0

    def _wake_after(self, num_bytes: int) -> None:
        """Let the kernel report the socket as readable when it has received this number of bytes.

        A receiver that is faster than the sender would sleep and wake for each small part.
        """
        if num_bytes != self._wake_bytes:
            self._wake_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _on_message(self, message: R) -> None:
        if isinstance(message, Ping):
            self._queue.add_first(PONG)  # ahead of fragments
            self._queue_changed()
        elif not isinstance(message, Pong) and self._handler is not None:
            self._handler.on_message(message)

    # --- writing ----------------------------------------------------------------------------------

    def _queue_changed(self) -> None:
        """Write in the next pass of the loop, with all messages queued until then."""
        if self._queue.waiting > MAX_QUEUED:
            self.abort(f"the other side did not read {MAX_QUEUED} messages")
        elif not self._writer_armed and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self._writer_armed:
            self._on_writable()

    def _on_writable(self) -> None:
        if self.reason:
            return
        try:
            if buffers := self._queue.buffers():
                sent = self._socket.sendmsg(buffers)
                self._sent = True
                self.sent_bytes += sent
                self._queue.drop_sent(sent)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.abort(f"the connection was lost: {error}")
            return
        except BaseException as error:
            self.abort(f"an internal error: {error!r}")
            raise
        self._arm(bool(self._queue))
        self._end_if_sent()

    def _arm(self, wanted: bool) -> None:
        """Write when the socket is writable, while bytes wait."""
        if wanted == self._writer_armed:
            return
        self._writer_armed = wanted
        if wanted:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _end_if_sent(self) -> None:
        if self._closing and not self._queue:
            self.abort("closed")

    # --- liveness ---------------------------------------------------------------------------------

    def _check(self) -> None:
        """Count an interval in which the other side sent nothing, or read nothing."""
        if not self._received:
            self._on_readable()  # WAKE_BYTES were not reached, or the loop was blocked
            if self.reason:
                return
        limits = self._limits
        if limits is None:
            return
        self._timer = self._loop.call_later(limits.ping_seconds, self._check)
        waits = bool(self._queue)
        self._stuck = self._stuck + 1 if waits and not self._sent else 0
        # A process that reads fragments is alive: our Ping may be behind them in its kernel's
        # queue.
        is_alive = self._received or (waits and self._sent)
        self._silent = 0 if is_alive else self._silent + 1
        self._received = self._sent = False
        limit = limits.silent_pings
        seconds = limit * limits.ping_seconds
        self.timed_out = self._silent >= limit or self._stuck >= limit
        if self.timed_out:
            did = "sent" if self._silent >= limit else "read"
            self.abort(f"the other side {did} nothing for {seconds} s")
        elif self._silent and not waits and not self._closing:
            self._queue.add_first(PING)
            self._queue_changed()
