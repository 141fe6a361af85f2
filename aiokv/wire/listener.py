"""Listener: accepts sockets, and authenticates the processes that connect."""

from __future__ import annotations

import asyncio
import errno
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aiokv.base.checks import Unique
from aiokv.base.logs import Log
from aiokv.wire.frames import ProtocolError
from aiokv.wire.sockets import HandshakeError, deadline, remote_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Iterator

    from aiokv.wire.connection import Connection, WireLimits

log = Log(__name__)

C = TypeVar("C", bound="Connection[Any, Any]")

BACKLOG: Final = 128
_REFUSAL_LOG_SECONDS: Final = 10.0
_ACCEPT_RETRY_SECONDS: Final = 1.0  # pause after the process ran out of descriptors
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(Unique, Generic[C]):
    """Accepts connections on a socket. Used on one loop.

    Args:
        listening: non-blocking socket that listens; the listener closes it.
        name: name of the socket, for error and log messages.
        admit: called with the listener, an accepted socket, and the name of its other end.
            Authenticates both sides within ``limits.handshake_seconds``, and returns the
            connection. Raises ``HandshakeError``, ``ProtocolError`` or ``OSError`` to refuse the
            socket, which is closed then.
        on_connection: gets each connection, and calls its ``start`` at once.
        limits: limits of handshakes and of connections.

    Attributes:
        address: address of the socket: host and port, or the path.
        refused: number of sockets that did not become a connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        name: str,
        admit: Callable[[Listener[C], socket.socket, str], Awaitable[C]],
        on_connection: Callable[[C], None],
        limits: WireLimits,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._admit_socket = admit
        self._on_connection = on_connection
        self._limits = limits
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first; none is cancelled
        self._tasks: set[asyncio.Task[None]] = set()  # handshakes, including cancelled ones
        self._connections: set[C] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._log_after = 0.0
        self._closed = False
        self._reserved = 0  # connections for which `room` has set a place aside
        self._name = name
        self.address: Any = listening.getsockname()
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

    @contextmanager
    def room(self) -> Iterator[None]:
        """Reserve one of ``limits.max_connections``, for the last steps of a handshake.

        Raises:
            HandshakeError: there are too many connections.
        """
        limit = self._limits.max_connections
        if self.connections + self._reserved >= limit:
            raise HandshakeError(f"there are {limit} connections already")
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    def close(self) -> None:
        """Stop listening, and begin to end all handshakes. Idempotent.

        Connections that were given to ``on_connection`` are not affected. After the end of the
        loop, it closes the socket only.
        """
        if not self._closed:
            self._closed = True
            if self._loop.is_closed():
                self._socket.close()
                return
            if self._retry is not None:
                self._retry.cancel()
            self._loop.remove_reader(self._socket)
            self._loop.call_soon(self._socket.close)
        self.end_handshakes()

    def end_handshakes(self) -> None:
        """Begin to end the handshakes of all sockets that are not authenticated. Idempotent."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Stop listening, and end all handshakes. Idempotent; see ``close``.

        Cancellation: call it again.
        """
        self.close()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await asyncio.sleep(0)  # then the socket is closed

    def _on_acceptable(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
                log.error("wire.accept_failed", listener=self._name, reason=str(error))
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_ACCEPT_RETRY_SECONDS, self._resume)
                return
            self._begin_handshake(accepted)

    def _resume(self) -> None:
        self._loop.add_reader(self._socket, self._on_acceptable)

    def _begin_handshake(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if len(self._handshakes) >= self._limits.max_unauthenticated:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._admit(accepted))
        self._handshakes[task] = None
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_handshake_done, accepted))

    def _on_handshake_done(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._tasks.discard(task)
        if task.cancelled():
            accepted.close()  # a task that is cancelled before it runs does not close it
        else:
            task.result()  # an error of on_connection goes to the loop

    async def _admit(self, accepted: socket.socket) -> None:
        seconds = self._limits.handshake_seconds
        remote = ""
        try:
            remote = remote_of(accepted)
            async with deadline(seconds):
                connection = await self._admit_socket(self, accepted, remote)
        except BaseException as error:
            accepted.close()
            self.refused += 1
            if isinstance(error, TimeoutError):
                self._log_refusal(remote, f"the handshake did not end within {seconds} s")
            elif isinstance(error, HandshakeError | ProtocolError | OSError):
                self._log_refusal(remote, str(error))
            else:
                raise
            return
        self._connections.add(connection)
        try:
            self._on_connection(connection)
        except BaseException as error:
            connection.abort(f"an internal error: {error!r}")
            raise

    def _log_refusal(self, remote: str, reason: str) -> None:
        """Log a refused socket, but not each one of a flood."""
        if self._loop.time() >= self._log_after:
            self._log_after = self._loop.time() + _REFUSAL_LOG_SECONDS
            log.warning("wire.refused", remote=remote, reason=reason, refused=self.refused)
