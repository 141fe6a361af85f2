"""Proxy: forwards TCP connections to a port, slowly or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

_CHUNK_BYTES = 65_536


class Proxy:
    """A port of 127.0.0.1 that forwards to another one; used as ``async with Proxy(port)``.

    Attributes:
        port: port to connect to.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._bytes_per_second: float | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def pause(self) -> None:
        """Forward nothing until ``resume``; connections are still accepted."""
        self._open.clear()

    def limit(self, bytes_per_second: float) -> None:
        """Forward no more than this, per connection and direction."""
        self._bytes_per_second = bytes_per_second

    def resume(self) -> None:
        """Forward at full speed."""
        self._bytes_per_second = None
        self._open.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer))
                group.create_task(self._forward(far_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # the connection ends, as it would without the proxy
        finally:
            for each in writers:
                each.transport.abort()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await self._open.wait()
            rate = self._bytes_per_second
            size = _CHUNK_BYTES if rate is None else max(1, int(rate / 20))
            chunk = await reader.read(size)
            await self._open.wait()
            if not chunk:
                raise ConnectionResetError  # ends the other direction, too
            if rate is not None:
                await asyncio.sleep(len(chunk) / rate)
            writer.write(chunk)
            await writer.drain()
