"""A process that forwards TCP connections to a port, slowly on demand.

``python proxy.py TARGET PORT``. SIGUSR1 limits it to 100 bytes per second, connection and
direction; SIGUSR2 ends that. It is a process of its own, because a client library may hold the
interpreter's lock while it waits for an answer.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

SLOW_BYTES_PER_SECOND = 100
CHUNK_BYTES = 65_536


class Proxy:
    """Forwards the connections of a port to another one."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_slow = False

    async def serve(self, port: int) -> None:
        """Accept connections until the process ends."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._set_slow, True)
        loop.add_signal_handler(signal.SIGUSR2, self._set_slow, False)
        server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        await server.serve_forever()

    def _set_slow(self, is_slow: bool) -> None:
        self._is_slow = is_slow

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        with suppress(OSError):
            await asyncio.gather(
                self._forward(reader, far_writer), self._forward(far_reader, writer)
            )
        for each in (writer, far_writer):
            each.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(SLOW_BYTES_PER_SECOND if self._is_slow else CHUNK_BYTES):
            if self._is_slow:
                await asyncio.sleep(len(chunk) / SLOW_BYTES_PER_SECOND)
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


if __name__ == "__main__":
    asyncio.run(Proxy(int(sys.argv[1])).serve(int(sys.argv[2])))
