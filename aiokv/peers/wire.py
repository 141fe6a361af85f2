"""Connection: the control connection of a sending and a receiving rank, over TCP.

A connection exists only after both sides have proven that they know the secret. Each end has one
owner, a :class:`Handler`, which gets the messages in callbacks of the loop.

The socket is read and written in callbacks of the loop, without a task per connection and without
asyncio's transports: bytes of parcels go from the outgoing slot to the kernel, and from the kernel
to the landing slot, without a copy in between. One callback moves at most ``READ_BYTES`` or
``WRITE_BYTES``.

Liveness: a connection that received nothing for ``ping_seconds`` asks with a ``Ping``; one that
received nothing for ``silent_pings`` of these intervals is cut, and so is one whose peer does not
read. Intervals are counted, so that a loop that was blocked cuts no connection.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import msgspec

from aiokv.checks import Unique, integer, positive, shown, text
from aiokv.errors import ConfigError, InternalError, PeerError
from aiokv.observe.logs import Log
from aiokv.peers.frames import READ_BYTES, FrameError, FrameReader, FrameWriter
from aiokv.peers.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    Handshake,
    HandshakeError,
    SessionKeys,
    check_secret,
)
from aiokv.peers.messages import Landed, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from aiokv.peers.messages import Message

log = Log(__name__)

WRITE_BYTES: Final = 1 << 20  # of one system call, which holds the loop while it copies
CALL_BYTES: Final = 16 << 10  # that a system call and its frames count as, in READ_BYTES
WAKE_BYTES: Final = 512 << 10  # of a parcel: fewer wake the loop more often than they help
MAX_QUEUED: Final = 1 << 16  # messages that wait for the peer to read
BACKLOG: Final = 128
_MAX_BUFFERS: Final = 64  # of one sendmsg
_REFUSAL_LOG_SECONDS: Final = 10.0
_ACCEPT_RETRY_SECONDS: Final = 1.0  # after the process ran out of descriptors
_CLOSED: Final = (
    "the other side closed the connection during the handshake: it has another secret, or too many "
    "connections"
)
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class WireLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a listener and of its connections, or of an opened connection.

    Attributes:
        handshake_seconds: from the accepted socket to the last proof.
        max_unauthenticated: sockets in a handshake; a further one ends the oldest.
        max_connections: authenticated connections of a listener; further ones are refused.
        ping_seconds: interval of the checks of a connection.
        silent_pings: intervals without a byte from the peer, after which the connection is cut;
            likewise intervals in which the peer reads nothing although bytes wait for it.
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


class Handler(Protocol):
    """Owner of one end of a connection. All methods are called from callbacks of the loop.

    An exception of a method is reported to the loop, and cuts the connection.
    """

    def on_message(self, message: Message) -> None:
        """Take a message, other than ``Ping`` and ``Pong``.

        A ``Landed`` comes here only if no bytes follow it, from a one-sided transport.
        """

    def place(self, landed: Landed) -> memoryview | None:
        """Return the memory for the parcel that follows, or None to discard the parcel.

        The memory has exactly ``landed.parcel_bytes``. The connection writes it until
        ``on_parcel`` or ``on_closed``, or until ``abort`` returned.
        """

    def on_parcel(self, landed: Landed) -> None:
        """Note that all bytes of a parcel are in their place; not called for discarded parcels."""

    def on_closed(self, reason: str) -> None:
        """Note the end of the connection: it neither reads nor writes any more.

        Called once, and never from inside a call of the owner.
        """


class ParcelWrites:
    """Parcels that were given to a connection in one call.

    Attributes:
        ended: result None when all parcels that were not withdrawn are written, and the error when
            the connection ended before; the connection does not read their memory then.
    """

    def __init__(self, parcels: Sequence[Landed]) -> None:
        self.ended: asyncio.Future[PeerError | None] = asyncio.get_running_loop().create_future()
        self._waiting = deque(parcels)  # their writes have not begun, in order
        self._unwritten = len(self._waiting)
        self.withdrawn = False
        self._end_if_written()

    def withdraw(self) -> list[Landed]:
        """Do not begin further writes; return the parcels that will not be written. Idempotent."""
        self.withdrawn = True
        unsent = list(self._waiting)
        self._waiting.clear()
        self._unwritten -= len(unsent)
        self._end_if_written()
        return unsent

    # --- for the connection -----------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the write of the next parcel begins."""
        self._waiting.popleft()

    def note_written(self) -> None:
        """Note that the connection no longer reads a parcel whose write had begun."""
        self._unwritten -= 1
        self._end_if_written()

    def fail(self, reason: str) -> None:
        """Note that the connection ended."""
        if not self.ended.done():
            self.ended.set_result(PeerError(reason))

    def _end_if_written(self) -> None:
        if not self._unwritten and not self.ended.done():
            self.ended.set_result(None)


class _Queued:
    """A message, with or without a parcel, that has no frame yet."""

    __slots__ = ("message", "parcel", "writes")

    def __init__(
        self,
        message: Message,
        parcel: memoryview | None = None,
        writes: ParcelWrites | None = None,
    ) -> None:
        self.message = message
        self.parcel = parcel
        self.writes = writes


class Connection(Unique):
    """One end of an authenticated connection. Used on one loop.

    ``open`` and :func:`listen` make connections. Nothing is read before ``start``.

    Attributes:
        remote: host and port of the other end, for messages.
        reason: why the connection ended; empty while it is open.
        sent_bytes: frames and parcels that the kernel took.
        received_bytes: frames and parcels that arrived.
    """

    def __init__(
        self, connected: socket.socket, remote: str, keys: SessionKeys, limits: WireLimits
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._limits = limits
        self._keys = keys
        self._handler: Handler | None = None
        self._reader: FrameReader | None = None
        self._writer = FrameWriter(keys.sending)
        self._queue: deque[_Queued] = deque()
        self._active: deque[tuple[memoryview, ParcelWrites | None]] = deque()  # frames, parcels
        self._active_bytes = 0
        self._flush_scheduled = False
        self._writer_armed = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_bytes = 1  # in the kernel that make the socket readable
        self._received = False  # since the last check
        self._sent = False  # likewise
        self._silent = 0  # checks since the last byte was received
        self._stuck = 0  # checks since the last byte was sent, while bytes waited
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._holds = 0  # users that keep the socket open behind the end of the connection
        self.remote = remote
        self.reason = ""
        self.sent_bytes = 0
        self.received_bytes = 0

    def __repr__(self) -> str:
        state = f"ended: {self.reason}" if self.reason else "open"
        return f"<Connection {self.remote}, {state}>"

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        secret: bytes,
        *,
        timeout: float,
        limits: WireLimits = WireLimits(),  # noqa: B008  (frozen)
    ) -> Self:
        """Connect to a listener, and authenticate both sides.

        Args:
            host: name or address.
            port: TCP port.
            secret: of both sides.
            timeout: seconds for name, connection and handshake together.
            limits: of the connection.

        Raises:
            PeerError: the other side cannot be reached, is no peer, or has another secret. Nothing
                is left behind.
            ConfigError: the secret is too short.

        Cancellation: nothing is left behind.
        """
        handshake = Handshake(secret, "client")
        remote = place(host, port)
        try:
            async with _deadline(timeout):
                connected = await _connected(host, port)
                try:
                    await _authenticate_client(connected, handshake)
                except BaseException:
                    connected.close()
                    raise
        except TimeoutError:
            raise PeerError(f"{remote} did not answer within {timeout} s") from None
        except HandshakeError as error:
            raise PeerError(
                f"{remote}: {error}", hint="give all engines the same Peers(secret=...)"
            ) from None
        except (OSError, OverflowError, UnicodeError) as error:
            raise PeerError(f"cannot connect to {remote}: {error}") from error
        return cls(connected, remote, handshake.keys(), limits)

    def start(self, handler: Handler) -> None:
        """Begin to deliver messages. Called once.

        Args:
            handler: gets them, and ``on_closed``, also when the connection has ended before.
        """
        self._handler = handler
        if self.reason:
            self._loop.call_soon(self._tell_closed)
            return
        self._reader = FrameReader(
            self._keys.receiving, self._on_message, handler.place, handler.on_parcel
        )
        self._loop.add_reader(self._socket, self._on_readable)
        self._timer = self._loop.call_later(self._limits.ping_seconds, self._check)

    def send(self, message: Message) -> None:
        """Queue a message; without effect on a connection that has ended.

        Messages and parcels arrive in the order of the calls.
        """
        if self.reason or self._closing:
            return
        self._queue.append(_Queued(message))
        self._queue_changed()

    def write(self, parcels: Iterable[tuple[Landed, memoryview]]) -> ParcelWrites:
        """Queue parcels, each behind its ``Landed``.

        Args:
            parcels: each memory has ``parcel_bytes``. The connection reads it until ``ended`` of
                the result, or until the parcel was withdrawn.
        """
        batch = list(parcels)
        writes = ParcelWrites([landed for landed, _ in batch])
        for landed, parcel in batch:
            if len(parcel) != landed.parcel_bytes:
                raise InternalError(f"{len(parcel)} bytes for a parcel of {landed.parcel_bytes}")
        if self.reason or self._closing:
            writes.fail(self.reason or "the connection is being closed")
            return writes
        self._queue.extend(_Queued(landed, parcel, writes) for landed, parcel in batch)
        self._queue_changed()
        return writes

    def close(self) -> None:
        """Deliver nothing more, and end the connection when all queued bytes are sent. Idempotent.

        A peer that does not read is cut as on an open connection.
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

        When it returns, the connection accesses no memory of parcels.
        """
        if self.reason:
            return
        # The second one is for an interrupt that hits this call, or the first one.
        for _ in range(2):
            self._loop.call_soon(self._tell_closed)
        self.reason = reason or "aborted"
        self._stop()

    def _stop(self) -> None:
        """Access no memory of parcels any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if not self._holds:
            self._close_socket()
        for _, writes in self._active:
            if writes is not None:
                writes.fail(self.reason)
        for queued in self._queue:
            if queued.writes is not None:
                queued.writes.fail(self.reason)
        self._active.clear()
        self._queue.clear()
        if not self._closed.done():
            self._closed.set_result(self.reason)

    def _tell_closed(self) -> None:
        """Tell the handler that the connection has ended. Idempotent."""
        self.reason = self.reason or "an interrupt"
        if self._socket.fileno() >= 0:
            self._stop()
        if self._handler is not None:
            self._handler.on_closed(self.reason)
        self._handler = None  # without the cycle of handler and connection, both are freed at once

    async def closed(self) -> str:
        """Wait for the end of the connection; return the reason.

        Cancellation: stops waiting.
        """
        return await asyncio.shield(self._closed)

    # --- the socket behind the end, for one-sided transports --------------------------------------

    def hold(self) -> None:
        """Keep the socket open behind the end of the connection, until ``unhold``.

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

        Called after the end of this connection, between ``hold`` and ``unhold``. The peer learns
        of the end, if it runs.

        Raises:
            PeerError: the connection failed in another way, so that nothing is known of the peer.

        Cancellation: stops waiting; call it again.
        """
        if not self.reason or not self._holds:
            raise InternalError("peer_ended: the connection is open, or is not held")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        await asyncio.sleep(0)  # uvloop stops to watch a descriptor one pass later
        ignored = bytearray(READ_BYTES)
        try:
            while await self._loop.sock_recv_into(self._socket, ignored):
                continue
        except ConnectionError:
            return
        except OSError as error:
            raise PeerError(f"{self.remote}: {error}") from error

    def _close_socket(self) -> None:
        # uvloop stops to watch a descriptor one pass later.
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
        except FrameError as error:
            self.abort(f"the peer sent {error}")
        except BaseException as error:
            self.abort(f"an internal error: {error!r}")
            raise
        if not self.reason:
            self._wake_after(max(1, min(reader.parcel_bytes_left, WAKE_BYTES)))

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
            self.abort("the peer closed the connection")
            return 0
        self._received = True
        self.received_bytes += num_bytes
        reader.received(num_bytes)
        return num_bytes if num_bytes == wanted and not reader.stopped else 0

    def _wake_after(self, num_bytes: int) -> None:
        """Let the kernel report the socket as readable when it has so many bytes.

        A receiver that is faster than the sender would sleep and wake for each small part.
        """
        if num_bytes != self._wake_bytes:
            self._wake_bytes = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Ping):
            self._queue.appendleft(_Queued(Pong()))  # not behind parcels
            self._queue_changed()
        elif not isinstance(message, Pong) and self._handler is not None:
            self._handler.on_message(message)

    # --- writing ----------------------------------------------------------------------------------

    def _queue_changed(self) -> None:
        """Write in the next pass of the loop, together with what is queued until then."""
        if len(self._queue) > MAX_QUEUED:
            self.abort(f"the peer did not read {MAX_QUEUED} messages")
        elif not self._writer_armed and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._surely(self._write_queue)

    def _write_queue(self) -> None:
        self._flush_scheduled = False
        if not self._writer_armed:
            self._on_writable()

    def _on_writable(self) -> None:
        if self.reason:
            return
        try:
            self._fill()
            if self._active:
                sent = self._socket.sendmsg(_first_bytes(self._active, WRITE_BYTES))
                self._sent = True
                self.sent_bytes += sent
                self._drop_sent(sent)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.abort(f"the connection was lost: {error}")
            return
        except BaseException as error:
            self.abort(f"an internal error: {error!r}")
            raise
        self._surely(self._after_write)

    def _after_write(self) -> None:
        self._arm(bool(self._active or self._queue))
        self._end_if_sent()

    def _surely(self, action: Callable[[], None]) -> None:
        """Call ``action()``; an interrupt (Ctrl-C) in it ends the connection."""
        try:
            action()
        except BaseException as error:
            self.abort(f"an internal error: {error!r}")
            raise

    def _arm(self, wanted: bool) -> None:
        """Write when the socket is writable, while bytes wait."""
        if wanted == self._writer_armed:
            return
        self._writer_armed = wanted
        if wanted:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _fill(self) -> None:
        """Make frames of queued messages, for as many bytes as one call sends."""
        while self._queue and self._active_bytes < WRITE_BYTES:
            queued = self._queue[0]
            writes = queued.writes
            if writes is None or queued.parcel is None:
                self._activate(memoryview(self._writer.frame(queued.message)), None)
            elif not writes.withdrawn:
                writes.begin()
                frame = self._writer.frame(queued.message, has_parcel=True)
                self._activate(memoryview(frame), None)
                self._activate(queued.parcel, writes)
            self._queue.popleft()  # at the end: an interrupt before it fails the write

    def _activate(self, buffer: memoryview, writes: ParcelWrites | None) -> None:
        self._active.append((buffer, writes))
        self._active_bytes += len(buffer)

    def _drop_sent(self, sent: int) -> None:
        self._active_bytes -= sent
        while sent:
            buffer, writes = self._active[0]
            if sent < len(buffer):
                self._active[0] = (buffer[sent:], writes)
                return
            sent -= len(buffer)
            if writes is not None:
                writes.note_written()
            self._active.popleft()  # at the end: an interrupt before it fails the write

    def _end_if_sent(self) -> None:
        if self._closing and not self._active and not self._queue:
            self.abort("closed")

    # --- liveness ---------------------------------------------------------------------------------

    def _check(self) -> None:
        self._surely(self._count_interval)

    def _count_interval(self) -> None:
        """Count an interval in which the peer sent nothing, or read nothing."""
        if not self._received:
            self._on_readable()  # fewer bytes than WAKE_BYTES, or the loop was blocked
            if self.reason:
                return
        self._timer = self._loop.call_later(self._limits.ping_seconds, self._check)
        if self._queue and not self._writer_armed:
            self._write_queue()  # an interrupt may have kept it from being written
        waits = bool(self._active or self._queue)
        self._stuck = self._stuck + 1 if waits and not self._sent else 0
        # A peer that reads parcels runs: a Ping may be queued behind them in its kernel.
        is_alive = self._received or (waits and self._sent)
        self._silent = 0 if is_alive else self._silent + 1
        self._received = self._sent = False
        limit = self._limits.silent_pings
        seconds = limit * self._limits.ping_seconds
        if self._silent >= limit:
            self.abort(f"the peer sent nothing for {seconds} s")
        elif self._stuck >= limit:
            self.abort(f"the peer read nothing for {seconds} s")
        elif self._silent and not waits and not self._closing:
            self._queue.appendleft(_Queued(Ping()))
            self._queue_changed()


class Listener(Unique):
    """A listening socket; :func:`listen` makes it.

    Attributes:
        host: address that it is bound to.
        port: TCP port that it is bound to.
        refused: sockets that did not become a connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        on_connection: Callable[[Connection], None],
        limits: WireLimits,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._secret = secret
        self._on_connection = on_connection
        self._limits = limits
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first; none is cancelled
        self._tasks: set[asyncio.Task[None]] = set()  # these, and the cancelled ones
        self._connections: set[Connection] = set()
        self._proven: set[Handshake] = set()  # of clients that become connections
        self._retry: asyncio.TimerHandle | None = None
        self._log_after = 0.0
        self._closed = False
        self.host, self.port = listening.getsockname()[:2]
        self.refused = 0
        self._loop.add_reader(self._socket, self._on_acceptable)

    @property
    def connections(self) -> int:
        """Number of authenticated connections that are open."""
        self._connections = {c for c in self._connections if not c.reason}
        return len(self._connections)

    @property
    def handshakes(self) -> int:
        """Number of sockets that are not authenticated yet."""
        return len(self._handshakes)

    async def aclose(self) -> None:
        """Stop listening, and end all handshakes. Idempotent.

        Connections that were given to ``on_connection`` are not affected.

        Cancellation: call it again.
        """
        if not self._closed:
            self._closed = True
            if self._retry is not None:
                self._retry.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.call_soon(self._socket.close)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.sleep(0)  # the socket is closed

    def _on_acceptable(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                log.error("peer.accept_failed", port=self.port, reason=str(error))
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume)
                return
            self._begin_handshake(accepted, place(address[0], address[1]))

    def _resume(self) -> None:
        self._loop.add_reader(self._socket, self._on_acceptable)

    def _begin_handshake(self, accepted: socket.socket, remote: str) -> None:
        accepted.setblocking(False)
        if len(self._handshakes) >= self._limits.max_unauthenticated:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._admit(accepted, remote))
        self._handshakes[task] = None
        self._tasks.add(task)
        task.add_done_callback(self._on_handshake_done)

    def _on_handshake_done(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # an error of on_connection goes to the loop

    async def _admit(self, accepted: socket.socket, remote: str) -> None:
        handshake = Handshake(self._secret, "server")
        seconds = self._limits.handshake_seconds
        try:
            async with _deadline(seconds):
                await self._authenticate(accepted, handshake)
        except BaseException as error:
            accepted.close()
            self.refused += 1
            if isinstance(error, TimeoutError):
                self._log_refusal(remote, f"the handshake did not end within {seconds} s")
            elif isinstance(error, HandshakeError | OSError):
                self._log_refusal(remote, str(error))
            else:
                raise
            return
        connection = Connection(accepted, remote, handshake.keys(), self._limits)
        self._connections.add(connection)
        try:
            self._on_connection(connection)
        except BaseException as error:
            connection.abort(f"an internal error: {error!r}")
            raise

    async def _authenticate(self, accepted: socket.socket, handshake: Handshake) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake.read_greeting(await _received(accepted, GREETING_BYTES))
        await self._loop.sock_sendall(accepted, handshake.greeting)
        handshake.check_proof(await _received(accepted, PROOF_BYTES))
        limit = self._limits.max_connections
        if self.connections + len(self._proven) >= limit:
            raise HandshakeError(f"there are {limit} connections already")
        self._proven.add(handshake)
        try:
            await self._loop.sock_sendall(accepted, handshake.proof())
        finally:
            self._proven.discard(handshake)

    def _log_refusal(self, remote: str, reason: str) -> None:
        """Log a refused socket, but not each one of a flood."""
        if self._loop.time() >= self._log_after:
            self._log_after = self._loop.time() + _REFUSAL_LOG_SECONDS
            log.warning("peer.refused", remote=remote, reason=reason, refused=self.refused)


async def listen(
    host: str,
    port: int,
    secret: bytes,
    on_connection: Callable[[Connection], None],
    *,
    limits: WireLimits = WireLimits(),  # noqa: B008  (frozen)
    any_address: bool = False,
) -> Listener:
    """Listen at one address.

    Args:
        host: name or address of this machine.
        port: TCP port; 0 for one that the system chooses.
        secret: of both sides.
        on_connection: gets each authenticated connection, and calls its ``start`` at once.
        limits: of the listener and of its connections.
        any_address: allow an address such as ``0.0.0.0``, which means all addresses.

    Raises:
        ConfigError: the secret is too short, the host is empty or cannot be resolved or means all
            addresses, or the port is in use. Nothing is left behind.

    Cancellation: nothing is left behind.
    """
    check_secret(secret)
    if not text("host", host, ConfigError):
        raise ConfigError(f"host is {shown(host)}; it must be a name or an address")
    integer("port", port, minimum=0, maximum=65535, error=ConfigError)
    try:
        family, address = (await _resolved(host, port))[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at {place(host, port)}: {error}") from error
    if not any_address and _means_any(address[0]):
        raise ConfigError(
            f"cannot listen at {place(host, port)}: {address[0]} means all addresses",
            hint="name the address that the other engines connect to",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        return Listener(listening, secret, on_connection, limits)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen at {place(host, port)}: {error}",
            hint="choose another port, or port 0",
        ) from error


@asynccontextmanager
async def _deadline(seconds: float) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` after ``seconds``.

    In two halves: between the halves, a loop that was blocked reads its sockets.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        half = loop.call_later(seconds / 2, lambda: timeout.reschedule(loop.time() + seconds / 2))
        try:
            yield
        finally:
            half.cancel()


def place(host: str, port: int) -> str:
    """Return host and port as text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _means_any(address: str) -> bool:
    """Return True if a socket that is bound to the address accepts on all addresses."""
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_unspecified


async def _resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return families and addresses of a host; an address is its own, without a thread.

    Raises:
        OSError: the name is unknown.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in infos]


async def _connected(host: str, port: int) -> socket.socket:
    """Return a connected socket to the first address of a host that accepts.

    Raises:
        OSError: no address accepts.
    """
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"{host} has no address")
    for family, address in await _resolved(host, port):
        connecting = socket.socket(family, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            await loop.sock_connect(connecting, address)
        except OSError as error:
            connecting.close()
            failure = error
        except BaseException:
            connecting.close()
            raise
        else:
            return connecting
    raise failure


async def _authenticate_client(connected: socket.socket, handshake: Handshake) -> None:
    loop = asyncio.get_running_loop()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        await loop.sock_sendall(connected, handshake.greeting)
        handshake.read_greeting(await _received(connected, GREETING_BYTES))
        await loop.sock_sendall(connected, handshake.proof())
        handshake.check_proof(await _received(connected, PROOF_BYTES))
    except ConnectionError:
        raise HandshakeError(_CLOSED) from None


async def _received(connected: socket.socket, num_bytes: int) -> bytes:
    """Return the next ``num_bytes``, and read no more than these.

    Raises:
        HandshakeError: the other side closed the connection before.
    """
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < num_bytes:
        part = await loop.sock_recv(connected, num_bytes - len(received))
        if not part:
            raise HandshakeError(_CLOSED)
        received += part
    return received


def _first_bytes(
    buffers: Iterable[tuple[memoryview, ParcelWrites | None]], most: int
) -> list[memoryview]:
    """Return the first ``most`` bytes of all buffers, not copied."""
    first: list[memoryview] = []
    for buffer, _ in buffers:
        first.append(buffer[:most])
        most -= len(first[-1])
        if not most or len(first) == _MAX_BUFFERS:
            break
    return first
