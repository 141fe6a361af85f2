"""Servers of Redis or Valkey for tests: started on free ports, killed at the end; and a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.servers import HINT, Server, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

redis = pytest.importorskip("redis", reason=f"redis-py is not installed; {HINT}")

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    PROGRAM is None, reason=f"neither valkey-server nor redis-server is installed; {HINT}"
)


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition returns a true value; an error of a client counts as false."""

    def holds() -> bool:
        try:
            return bool(condition())
        except (redis.RedisError, OSError):
            return False

    wait_until(holds)


class RedisServer(Server):
    """One server process without persistence; its files are in ``directory``.

    Args:
        directory: working directory of the process.
        options: settings by name, such as ``maxmemory="10mb"``; ``_`` stands for ``-``.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.options = options
        settings = {
            "bind": "127.0.0.1",
            "dir": str(directory),
            "save": "",
            "appendonly": "no",
            "loglevel": "warning",
        }
        settings |= {name.replace("_", "-"): value for name, value in options.items()}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        super().__init__(
            lambda port: [str(PROGRAM), "--port", str(port), *arguments],
            directory / "log",
            is_ready=self._is_answering,
        )

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        """Return a plain synchronous client."""
        if password := self.options.get("requirepass"):
            options.setdefault("password", password)
        return redis.Redis(port=self.port, socket_timeout=PATIENCE_SECONDS, protocol=2, **options)

    def command(self, *arguments: Any) -> Any:
        """Send one command with a client of its own, and return the reply as it is."""
        with self.client() as client:
            client.response_callbacks.clear()  # these differ between versions of redis-py
            return client.execute_command(*arguments)

    def is_master(self) -> bool:
        """Return whether the server is a master; False when it does not answer."""
        with contextlib.suppress(redis.RedisError, OSError):
            return bool(self.command("ROLE")[0] == b"master")
        return False

    def restart(self) -> None:
        """Kill the process, and start it empty on the same port."""
        self.kill()
        self.start()

    def _is_answering(self) -> bool:
        """Return whether the server replies, be it with an error."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), PATIENCE_SECONDS) as connected:
                connected.sendall(b"PING\r\n")
                return connected.recv(1) in (b"+", b"-")
        except OSError:
            return False


@contextlib.contextmanager
def running_server(directory: Path, **options: str) -> Iterator[RedisServer]:
    """Run one server."""
    server = RedisServer(directory, **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class Cluster:
    """Three masters with a replica each."""

    def __init__(self, directory: Path) -> None:
        self.servers = [
            RedisServer(
                directory / str(number),
                cluster_enabled="yes",
                cluster_port=str(free_port()),
                cluster_config_file="nodes.conf",
                cluster_node_timeout="4000",  # a server may stall for less
                cluster_replica_validity_factor="0",
                repl_diskless_sync_delay="0",
            )
            for number in range(6)
        ]

    @property
    def url(self) -> str:
        return "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        masters, replicas = self.servers[:3], self.servers[3:]
        boundaries = [0, 5461, 10923, 16384]
        for number, server in enumerate(masters):
            server.command(
                "CLUSTER", "ADDSLOTSRANGE", boundaries[number], boundaries[number + 1] - 1
            )
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            first = self.servers[0]
            bus = first.options["cluster_port"]
            server.command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
        until(lambda: all(map(self.knows_all, self.servers)))
        for replica, master in zip(replicas, masters, strict=True):
            name = master.command("CLUSTER", "MYID")
            until(lambda r=replica, n=name: r.command("CLUSTER", "REPLICATE", n))
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until every server that runs serves, with a master or as one."""
        until(lambda: all(map(self.is_ready, self.servers)))

    def is_ready(self, server: RedisServer) -> bool:
        """Return whether a server serves all slots, and is linked to its master if it has one."""
        if not server.command("CLUSTER", "INFO").startswith(b"cluster_state:ok"):
            return False
        slots = server.command("CLUSTER", "SHARDS")
        role = server.command("ROLE")
        return len(slots) == 3 and (role[0] == b"master" or role[3] == b"connected")

    @staticmethod
    def until_replicated(master: RedisServer, replica: RedisServer) -> None:
        """Wait until a replica has all that its master has."""
        until(lambda: replica.command("ROLE")[4] >= master.command("ROLE")[1])

    @staticmethod
    def knows_all(server: RedisServer) -> bool:
        """Return whether a server has met all nodes."""
        lines = server.command("CLUSTER", "NODES").splitlines()
        return len(lines) == 6 and not any(b"handshake" in line for line in lines)

    def master_of(self, name: bytes) -> RedisServer:
        """Return the server that is the master of a key, as soon as it serves."""
        serving: list[RedisServer] = []

        def is_found() -> bool:
            for server in self.servers:
                if server.is_master():
                    with contextlib.suppress(redis.RedisError):
                        server.command("EXISTS", name)
                        serving.append(server)
                        return True
            return False

        until(is_found)
        return serving[0]

    def replica_of(self, master: RedisServer) -> RedisServer:
        """Return a server that replicates another one."""
        for server in self.servers:
            if server is not master:
                role = server.command("ROLE")
                if role[0] == b"slave" and role[2] == master.port:
                    return server
        raise AssertionError(f"the master on port {master.port} has no replica")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


class Flow:
    """One direction of a proxy: forwards ``budget`` bytes, and then holds back.

    Attributes:
        held: set while bytes are held back.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._budget: int | None = None
        self._chunk_bytes = chunk_bytes
        self._more = asyncio.Event()
        self.held = asyncio.Event()

    def allow(self, num_bytes: int | None) -> None:
        """Forward that number of bytes from now on, of all connections; None for all."""
        self._budget = num_bytes
        self.held.clear()
        self._more.set()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward until one side closes."""
        while data := await reader.read(self._chunk_bytes):
            while data:
                while self._budget == 0:
                    self.held.set()
                    self._more.clear()
                    await self._more.wait()
                count = len(data) if self._budget is None else min(len(data), self._budget)
                writer.write(data[:count])
                await writer.drain()
                data = data[count:]
                if self._budget is not None:
                    self._budget -= count
        raise ConnectionResetError


class Listener:
    """A server in the loop of the test; a subclass serves each connection."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def cut(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError(f"{type(self).__name__} must define serve()")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self.serve(reader, writer)
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


class ScriptedServer(Listener):
    """Sends the same bytes for each packet of requests; it is not part of a cluster."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self.reply = reply

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65_536):
            count = request.count(b"\r\naiokv:")
            writer.write(b"-ERR no cluster\r\n" if b"CLUSTER" in request else self.reply * count)


class Proxy(Listener):
    """A TCP proxy that holds back requests or replies.

    Args:
        port: port of the server.
        chunk_bytes: bytes that are forwarded at a time.

    Attributes:
        requests: bytes to the server.
        replies: bytes from the server.
    """

    def __init__(self, port: int, chunk_bytes: int = 65_536) -> None:
        super().__init__()
        self._server_port = port
        self.requests = Flow(chunk_bytes)
        self.replies = Flow(chunk_bytes)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, target = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.requests.run(reader, target))
                group.create_task(self.replies.run(source, writer))
        finally:
            target.transport.abort()
