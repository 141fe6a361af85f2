"""Connections: one per endpoint, shared, kept for reuse, closed when idle."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ClosedError, PeerError
from aiokv.peers.connections import Connections
from aiokv.peers.handshake import GREETING_BYTES
from aiokv.peers.wire import listen
from aiokv.testing import running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS, run_until_idle
from tests.peers.wires import HOST, SECRET, RawSocket, Recorder

if TYPE_CHECKING:
    from aiokv.peers.wire import Connection
    from aiokv.wire.listener import Listener


class Server:
    """A listener whose connections are recorded."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        self.ends: list[Connection] = []
        self.listener: Listener | None = None

    async def open(self) -> int:
        self.listener = await listen(HOST, 0, SECRET, self.accept)
        return self.listener.address[1]

    def accept(self, connection: Connection) -> None:
        self.recorders.append(Recorder())
        self.ends.append(connection)
        connection.start(self.recorders[-1])

    async def aclose(self) -> None:
        for end in self.ends:
            end.abort("the test ended")
        await self.listener.aclose()


class Opened:
    """``Connections`` and the handlers that it asked for."""

    def __init__(self, **options: object) -> None:
        self.recorders: list[Recorder] = []
        self.connections = Connections(SECRET, self.handler, **options)

    def handler(self, connection: Connection) -> Recorder:
        assert connection.reason == ""
        self.recorders.append(Recorder())
        return self.recorders[-1]


@pytest.fixture
def silent():
    """A socket that accepts in its backlog, and never replies."""
    with socket.create_server((HOST, 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.asyncio
async def test_connection_is_shared_and_reused():
    server, opened = Server(), Opened()
    port = await server.open()
    acquire = opened.connections.acquire
    first, second = await asyncio.gather(
        acquire(HOST, port, timeout=PATIENCE_SECONDS), acquire(HOST, port, timeout=PATIENCE_SECONDS)
    )
    assert first is second
    opened.connections.release(HOST, port)
    opened.connections.release(HOST, port)
    assert await acquire(HOST, port, timeout=PATIENCE_SECONDS) is first
    assert len(opened.recorders) == 1
    assert opened.connections.open_connections == 1
    await run_until_idle(lambda: len(server.ends) == 1)
    await opened.connections.aclose()
    assert opened.recorders[0].closed == ["closed"]
    opened.connections.release(HOST, port)
    await server.aclose()


@pytest.mark.asyncio
async def test_each_endpoint_has_its_own_connection():
    servers, opened = [Server(), Server()], Opened()
    ports = [await server.open() for server in servers]
    ends = {
        await opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS) for port in ports
    }
    assert len(ends) == 2
    await opened.connections.aclose()
    for server in servers:
        await run_until_idle(lambda s=server: bool(s.ends))
        await server.aclose()


@pytest.mark.asyncio
async def test_lost_connection_is_replaced():
    server, opened = Server(), Opened()
    port = await server.open()
    first = await opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
    first.abort("lost")
    second = await opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
    assert second is not first
    assert opened.connections.open_connections == 1
    await run_until_idle(lambda: len(server.ends) == 2)
    await opened.connections.aclose()
    await server.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_idle_connection_is_closed_and_a_used_one_is_not():
    server, opened = Server(), Opened(idle_seconds=60.0)
    port = await server.open()
    clock = running_clock()
    for _ in range(2):
        connection = await opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
        await clock.advance(200)
        opened.connections.release(HOST, port)
        await clock.advance(59)
        assert connection.reason == ""
    await clock.advance(2)
    assert connection.reason == "closed"
    assert opened.connections.open_connections == 0
    await run_until_idle(lambda: bool(server.recorders[0].closed))
    again = await opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
    assert again is not connection
    await run_until_idle(lambda: len(server.ends) == 2)
    await opened.connections.aclose()
    assert clock.timers == 1  # of the second connection, at the server
    await server.aclose()


@pytest.mark.asyncio
async def test_all_callers_get_the_error_of_the_attempt():
    with socket.create_server((HOST, 0)) as listening:
        port = listening.getsockname()[1]
    opened = Opened()
    errors = await asyncio.gather(
        *(opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS) for _ in range(3)),
        return_exceptions=True,
    )
    assert [type(error) for error in errors] == [PeerError] * 3
    assert len({id(error) for error in errors}) == 3
    assert "cannot connect" in str(errors[0])
    await opened.connections.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_attempt_goes_on_while_one_caller_waits(silent):
    opened = Opened(connect_seconds=10.0)
    impatient = asyncio.create_task(opened.connections.acquire(HOST, silent, timeout=1))
    patient = asyncio.create_task(opened.connections.acquire(HOST, silent, timeout=100))
    cancelled = asyncio.create_task(opened.connections.acquire(HOST, silent, timeout=100))
    clock = running_clock()
    await clock.advance(0.5)
    cancelled.cancel()
    await clock.advance(1)
    with pytest.raises(PeerError, match="did not answer within 1 s"):
        await impatient
    assert cancelled.cancelled()
    assert not patient.done()
    await clock.advance(10)
    with pytest.raises(PeerError, match=r"did not answer within 10.0 s"):
        await patient
    await opened.connections.aclose()
    assert clock.timers == 0


@pytest.mark.asyncio
async def test_attempt_ends_with_its_last_caller_and_the_next_one_begins_anew(silent):
    opened = Opened()
    first = asyncio.create_task(opened.connections.acquire(HOST, silent, timeout=PATIENCE_SECONDS))
    await spin(5)
    first.cancel()
    await asyncio.sleep(0)  # the attempt is being cancelled
    second = asyncio.create_task(opened.connections.acquire(HOST, silent, timeout=PATIENCE_SECONDS))
    await spin(20)
    assert first.cancelled()
    assert not second.done()
    await opened.connections.aclose()
    with pytest.raises(ClosedError):
        await second
    with pytest.raises(ClosedError):
        await opened.connections.acquire(HOST, silent, timeout=PATIENCE_SECONDS)
    await opened.connections.aclose()


@pytest.mark.clock
@pytest.mark.asyncio
async def test_attempt_of_a_cancelled_caller_closes_its_socket():
    opened = Opened()
    with socket.create_server((HOST, 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        waiting = asyncio.create_task(
            opened.connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
        )
        raw = RawSocket((await asyncio.get_running_loop().sock_accept(listening))[0])
        waiting.cancel()
        assert len(await raw.receive_all()) in (0, GREETING_BYTES)  # and then the end
        raw.close()
    assert waiting.cancelled()
    await opened.connections.aclose()


@pytest.mark.asyncio
async def test_error_of_the_handler_closes_the_connection():
    server = Server()
    port = await server.open()
    connections = Connections(SECRET, lambda connection: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await connections.acquire(HOST, port, timeout=PATIENCE_SECONDS)
    await run_until_idle(lambda: bool(server.recorders and server.recorders[0].closed))
    await connections.aclose()
    await server.aclose()
