"""Servers of Redis or Valkey for tests: started on free ports, killed at the end; and a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

redis = pytest.importorskip("redis", reason="redis-py is not installed; run `make services`")

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(
    PROGRAM is None, reason="neither valkey-server nor redis-server is installed; `make services`"
)

READY_SECONDS = 30.0  # for a server that starts on a loaded machine


def until(condition: Callable[[], Any], what: str, seconds: float = READY_SECONDS) -> Any:
    """Poll a condition until it returns a true value, and return the value."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            if value := condition():
                return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """One server process without persistence; its files are in ``directory``.

    Args:
        directory: working directory of the process.
        options: settings by name, such as ``maxmemory="10mb"``; ``_`` stands for ``-``.
    """

    def __init__(self, directory: Path, **options: str) -> None:
        self.directory = directory
        self.options = options
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start the process, on the same port as before; return when it answers."""
        for _ in range(5):
            if self._start(self.port or free_port()):
                return self
        raise AssertionError((self.directory / "log").read_text())

    def _start(self, port: int) -> bool:
        settings = {
            "bind": "127.0.0.1",
            "port": str(port),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            "loglevel": "warning",
        }
        if "cluster_enabled" in self.options:
            settings["cluster-port"] = str(free_port())
        settings |= {name.replace("_", "-"): value for name, value in self.options.items()}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        assert PROGRAM is not None
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, *arguments], stdout=log, stderr=log)
        process = self._process
        until(lambda: process.poll() is not None or _answers(port), "start of a server")
        if process.poll() is not None:  # another process took the port
            return False
        self.port = port
        return True

    def client(self, **options: Any) -> Any:
        """Return a plain synchronous client."""
        if password := self.options.get("requirepass"):
            options.setdefault("password", password)
        return redis.Redis(port=self.port, socket_timeout=READY_SECONDS, protocol=2, **options)

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

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop the process (SIGSTOP) until ``resume``."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process (SIGKILL), and reap it. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill the process, and start it empty on the same port."""
        self.kill()
        self.start()


def _answers(port: int) -> bool:
    """Return whether a server on the port replies, be it with an error."""
    with socket.create_connection(("127.0.0.1", port), READY_SECONDS) as connected:
        connected.sendall(b"PING\r\n")
        return connected.recv(1) in (b"+", b"-")


@contextlib.contextmanager
def running_server(directory: Path, **options: str) -> Iterator[RedisServer]:
    """Run one server."""
    server = RedisServer(directory, **options)
    try:
        yield server.start()
    finally:
        server.kill()


class Cluster:
    """Three masters with a replica each."""

    def __init__(self, directory: Path) -> None:
        self.servers = [
            RedisServer(
                directory / str(number),
                cluster_enabled="yes",
                cluster_config_file="nodes.conf",
                cluster_node_timeout="1500",
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
        borders = [0, 5461, 10923, 16384]
        for number, server in enumerate(masters):
            server.command("CLUSTER", "ADDSLOTSRANGE", borders[number], borders[number + 1] - 1)
            server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            bus = self.servers[0].command("CONFIG", "GET", "cluster-port")
            server.command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port, bus[1])
        until(lambda: all(map(self.knows_all, self.servers)), "meeting of the nodes")
        for replica, master in zip(replicas, masters, strict=True):
            name = master.command("CLUSTER", "MYID")
            until(lambda r=replica, n=name: r.command("CLUSTER", "REPLICATE", n), "replication")
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until every server that runs serves, with a master or as one."""
        until(lambda: all(map(self.is_ready, self.servers)), "a cluster that serves")

    def is_ready(self, server: RedisServer) -> bool:
        """Return whether a server serves all slots, and is linked to its master if it has one."""
        if not server.command("CLUSTER", "INFO").startswith(b"cluster_state:ok"):
            return False
        slots = server.command("CLUSTER", "SHARDS")
        role = server.command("ROLE")
        return len(slots) == 3 and (role[0] == b"master" or role[3] == b"connected")

    @staticmethod
    def knows_all(server: RedisServer) -> bool:
        """Return whether a server has met all nodes."""
        lines = server.command("CLUSTER", "NODES").splitlines()
        return len(lines) == 6 and not any(b"handshake" in line for line in lines)

    def master_of(self, name: bytes) -> RedisServer:
        """Return the server that is the master of a key."""
        for server in self.servers:
            if server.is_master():
                with contextlib.suppress(redis.RedisError):
                    server.command("EXISTS", name)
                    return server
        raise AssertionError(f"no master serves {name!r}")

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
