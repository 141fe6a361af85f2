"""ConnectionPool: connections per node, and jobs on them in threads."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiokv.errors import StoreError
from aiokv.stores.redis.connection import RedisConnection, ReplyError
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from aiokv.stores.redis.options import Address, RedisServer

T = TypeVar("T")

_UNACKNOWLEDGED_MS: Final = 10_000  # after this time the kernel gives up an unreachable peer


class ConnectionPool:
    """Runs jobs on connections to nodes; up to ``limit`` jobs per node at a time.

    Args:
        server: credentials and TLS.
        executor: threads of the jobs.
        limit: connections per node.
        connect_seconds: time limit of connecting, TLS and authentication together.

    Attributes:
        opened: number of connections opened so far.
    """

    def __init__(
        self, server: RedisServer, executor: Executor, limit: int, connect_seconds: float
    ) -> None:
        self._server = server
        self._executor = executor
        self._connect_seconds = connect_seconds
        self._idle: dict[Address, list[RedisConnection]] = defaultdict(list)
        self._free: dict[Address, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(limit))
        self.opened = 0

    async def run(self, address: Address, job: Callable[[RedisConnection], T]) -> T:
        """Run a job in a thread, on a connection that no other job uses meanwhile.

        Raises:
            StoreError: the connection cannot be opened, or was lost during the job.

        Cancellation: the connection is closed, and the job has ended: it does not access blocks.
        """
        async with self._free[address]:
            connection = self._take_idle(address) or await self._open(address)
            try:
                result = await self._in_thread(connection, job)
            except OSError as error:
                connection.close()
                raise StoreError(
                    f"redis store: lost the connection to {address}: {error}"
                ) from error
            except BaseException:
                connection.close()
                raise
            self._idle[address].append(connection)
            return result

    def close_idle(self) -> None:
        """Close the connections that no job uses."""
        for connections in self._idle.values():
            while connections:
                connections.pop().close()

    def _take_idle(self, address: Address) -> RedisConnection | None:
        """Return the last used connection that the server has not closed."""
        connections = self._idle[address]
        while connections:
            connection = connections.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    async def _open(self, address: Address) -> RedisConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                connection = await self._connect(address)
        except TimeoutError as error:
            raise StoreError(
                f"redis store: {address} did not reply within {self._connect_seconds:g} s"
            ) from error
        except OSError as error:
            raise StoreError(f"redis store: cannot connect to {address}: {error}") from error
        self.opened += 1
        return connection

    async def _connect(self, address: Address) -> RedisConnection:
        connected = await _connected_socket(address)
        try:
            connection = RedisConnection(connected, self._server.tls, address.host)
        except BaseException:
            connected.close()
            raise
        try:
            refusal = await self._in_thread(connection, self._log_in)
        except BaseException:
            connection.close()
            raise
        if refusal is not None:
            connection.close()
            raise StoreError(f"redis store: {address} {refusal}")
        return connection

    def _log_in(self, connection: RedisConnection) -> str | None:
        """Authenticate and select the database; return the reason for a refusal."""
        server = self._server
        connection.handshake()
        if server.password:
            user = [server.username.encode()] if server.username else []
            reply = connection.request(b"AUTH", *user, server.password.encode())
            if isinstance(reply, ReplyError):
                return f"refused the user or the password: {reply.text}"
        if server.database:
            reply = connection.request(b"SELECT", b"%d" % server.database)
            if isinstance(reply, ReplyError):
                return f"refused database {server.database}: {reply.text}"
        return None

    async def _in_thread(
        self, connection: RedisConnection, job: Callable[[RedisConnection], T]
    ) -> T:
        """Run a job in a thread; when cancelled, abort the connection and await the job's end."""
        return await until_ended(self._executor.submit(job, connection), connection.abort)


async def until_ended(job: Future[T], abort: Callable[[], None] = lambda: None) -> T:
    """Return the result of a job in a thread.

    Cancellation: calls ``abort``, and waits until the job has ended.
    """
    future = asyncio.wrap_future(job)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        abort()
        await all_ended([future])
        raise
    return future.result()


async def _connected_socket(address: Address) -> socket.socket:
    """Return a connected blocking socket.

    Raises:
        OSError: no address of the host accepts.
    """
    loop = asyncio.get_running_loop()
    failure = OSError("the host name has no address")
    for family, kind, protocol, _, target in await _resolve(loop, address):
        found = socket.socket(family, kind, protocol)
        try:
            found.setblocking(False)
            await loop.sock_connect(found, target)
            found.setblocking(True)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        except OSError as error:
            found.close()
            failure = error
        except BaseException:
            found.close()
            raise
        else:
            return found
    raise failure


async def _resolve(loop: asyncio.AbstractEventLoop, address: Address) -> list[Any]:
    """Return the entries of ``getaddrinfo``; an IP address needs no thread."""
    flags = socket.AI_NUMERICHOST
    try:
        return [*socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)]
    except socket.gaierror:
        return [*await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)]
