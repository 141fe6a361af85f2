"""Connections: the connections that this rank has opened, one per endpoint, kept for reuse."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, PeerError
from aiokv.peers.wire import connect
from aiokv.wire.connection import WireLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.peers.wire import Connection, PeerHandler

IDLE_SECONDS: Final = 60.0
CONNECT_SECONDS: Final = 5.0


class _EndpointConnection:
    """The connection to one endpoint, or the attempt to make it."""

    def __init__(self) -> None:
        self.users = 0
        self.attempt: asyncio.Task[Connection] | None = None
        self.connection: Connection | None = None
        self.idle_timer: asyncio.TimerHandle | None = None


class Connections:
    """Opens a connection when it is first used, and closes it when it has been idle.

    Args:
        secret: secret that all engines share.
        handler: returns the handler of a new connection, which is started with it.
        limits: limits of the connections.
        connect_seconds: time limit of one attempt.
        idle_seconds: time after the last ``release``, after which a connection is closed.
    """

    def __init__(
        self,
        secret: bytes,
        handler: Callable[[Connection], PeerHandler],
        *,
        limits: WireLimits = WireLimits(),  # noqa: B008  (frozen)
        connect_seconds: float = CONNECT_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._secret = secret
        self._handler = handler
        self._limits = limits
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._endpoints: dict[tuple[str, int], _EndpointConnection] = {}
        self._attempts: set[asyncio.Task[Connection]] = set()  # includes cancelled attempts
        self._closed = False

    @property
    def open_connections(self) -> int:
        """Number of connections that are open."""
        return sum(
            endpoint.connection is not None and not endpoint.connection.reason
            for endpoint in self._endpoints.values()
        )

    async def acquire(self, host: str, port: int, *, timeout: float) -> Connection:
        """Return the connection to an endpoint; connect if there is none. Call ``release`` later.

        Concurrent callers share one attempt.

        Args:
            host: host of the endpoint.
            port: port of the endpoint.
            timeout: seconds for this caller; an attempt has ``connect_seconds``, too.

        Raises:
            PeerError: see ``connect``; or ``timeout`` passed.
            ClosedError: ``aclose`` was called.

        Cancellation: nothing is acquired; the attempt goes on while another caller waits for it.
        """
        if self._closed:
            raise ClosedError("the connections to peers are closed")
        endpoint = self._endpoints.setdefault((host, port), _EndpointConnection())
        endpoint.users += 1
        if endpoint.idle_timer is not None:
            endpoint.idle_timer.cancel()
            endpoint.idle_timer = None
        try:
            connection = endpoint.connection
            if connection is not None and not connection.reason:
                return connection
            return await self._connect(host, port, endpoint, timeout)
        except BaseException:
            self._release(host, port, endpoint)
            raise

    async def _connect(
        self, host: str, port: int, endpoint: _EndpointConnection, timeout: float
    ) -> Connection:
        attempt = endpoint.attempt or self._new_attempt(host, port, endpoint)
        await asyncio.wait((attempt,), timeout=timeout)
        if not attempt.done():
            raise PeerError(f"{host}:{port} did not answer within {timeout} s")
        if attempt.cancelled():
            raise ClosedError("the connections to peers are closed")
        failure = attempt.exception()
        if isinstance(failure, PeerError):
            raise PeerError(failure.args[0], hint=failure.hint) from failure
        return attempt.result()

    def _new_attempt(
        self, host: str, port: int, endpoint: _EndpointConnection
    ) -> asyncio.Task[Connection]:
        attempt = asyncio.get_running_loop().create_task(self._attempt(host, port, endpoint))
        endpoint.attempt = attempt
        self._attempts.add(attempt)
        attempt.add_done_callback(self._end_attempt)
        return attempt

    def _end_attempt(self, attempt: asyncio.Task[Connection]) -> None:
        self._attempts.discard(attempt)
        if not attempt.cancelled():
            attempt.exception()  # retrieve it: callers that were cancelled do not

    async def _attempt(self, host: str, port: int, endpoint: _EndpointConnection) -> Connection:
        try:
            connection = await connect(
                host, port, self._secret, timeout=self._connect_seconds, limits=self._limits
            )
            try:
                connection.start(self._handler(connection))
            except BaseException as error:
                connection.abort(f"an internal error: {error!r}")
                raise
            endpoint.connection = connection
            return connection
        finally:
            endpoint.attempt = None

    def release(self, host: str, port: int) -> None:
        """End one use of the connection to an endpoint."""
        endpoint = self._endpoints.get((host, port))
        if endpoint is not None:
            self._release(host, port, endpoint)

    def _release(self, host: str, port: int, endpoint: _EndpointConnection) -> None:
        endpoint.users -= 1
        if endpoint.users:
            return
        if endpoint.attempt is not None:
            endpoint.attempt.cancel()
        if endpoint.connection is None or endpoint.connection.reason or self._closed:
            self._forget(host, port, endpoint)
        else:
            endpoint.idle_timer = asyncio.get_running_loop().call_later(
                self._idle_seconds, self._forget, host, port, endpoint
            )

    def _forget(self, host: str, port: int, endpoint: _EndpointConnection) -> None:
        if self._endpoints.get((host, port)) is endpoint:
            del self._endpoints[host, port]
        if endpoint.connection is not None:
            endpoint.connection.close()

    async def aclose(self) -> None:
        """End all attempts and connections, those in use, too. Idempotent.

        Cancellation: call it again.
        """
        self._closed = True
        endpoints = list(self._endpoints.values())
        self._endpoints.clear()
        for endpoint in endpoints:
            if endpoint.idle_timer is not None:
                endpoint.idle_timer.cancel()
            if endpoint.connection is not None:
                endpoint.connection.abort("closed")
        for attempt in self._attempts:
            attempt.cancel()
        if self._attempts:
            await asyncio.wait(set(self._attempts))
        await asyncio.sleep(0)  # then the sockets are closed
