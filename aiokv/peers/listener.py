"""Listener: accepts connections of peers, and authenticates them."""

from __future__ import annotations

import asyncio
import errno
import socket
from functools import partial
from typing import TYPE_CHECKING, Final

from aiokv.base.checks import Unique, integer, shown, text
from aiokv.base.logs import Log
from aiokv.errors import ConfigError
from aiokv.peers.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    Handshake,
    HandshakeError,
    check_secret,
)
from aiokv.peers.sockets import deadline, means_any, place, received, resolved
from aiokv.peers.wire import Connection, WireLimits

if TYPE_CHECKING:
    from collections.abc import Callable

log = Log(__name__)

BACKLOG: Final = 128
_REFUSAL_LOG_SECONDS: Final = 10.0
_ACCEPT_RETRY_SECONDS: Final = 1.0  # after the process ran out of descriptors
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        task.add_done_callback(partial(self._on_handshake_done, accepted))

    def _on_handshake_done(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._tasks.discard(task)
        if task.cancelled():
            accepted.close()  # a task that is cancelled before it runs does not
        else:
            task.result()  # an error of on_connection goes to the loop

    async def _admit(self, accepted: socket.socket, remote: str) -> None:
        handshake = Handshake(self._secret, "server")
        seconds = self._limits.handshake_seconds
        try:
            async with deadline(seconds):
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
        handshake.read_greeting(await received(accepted, GREETING_BYTES))
        await self._loop.sock_sendall(accepted, handshake.greeting)
        handshake.check_proof(await received(accepted, PROOF_BYTES))
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
        family, address = (await resolved(host, port))[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at {place(host, port)}: {error}") from error
    if not any_address and means_any(address[0]):
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
