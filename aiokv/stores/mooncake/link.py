"""MasterLink: an idle connection that is closed at once when the master's process ends."""

from __future__ import annotations

import asyncio
from typing import Final

from aiokv.errors import StoreError

CONNECT_SECONDS: Final = 0.2


class MasterLink(asyncio.Protocol):
    """A connection to the RPC port of the master, over which nothing is sent.

    A call of the Mooncake client takes four seconds to fail when no process listens on the
    port. The kernel closes this connection when the master ends, and refuses a new one.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._transport: asyncio.BaseTransport | None = None
        self._closed: asyncio.Future[None] | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def ensure(self) -> str:
        """Connect unless connected, and return the local address of the connection.

        Raises:
            StoreError: the master cannot be reached.

        Cancellation: the link stays as it was.
        """
        async with self._connecting:
            if self._is_closed:
                raise StoreError(f"the link to {self._host}:{self._port} is closed")
            if self._transport is None:
                await self._connect()
            assert self._transport is not None
            return str(self._transport.get_extra_info("sockname")[0])

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: self, self._host, self._port)
        except TimeoutError:
            reason = f"no answer within {CONNECT_SECONDS} s"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        raise StoreError(f"Mooncake master {self._host}:{self._port} is unreachable: {reason}")

    async def check(self) -> None:
        """Check that the master's process runs: only then does it close a half-closed connection.

        The kernel also accepts connections for a process that was stopped. For such a master, the
        library would wait with the interpreter locked.

        Raises:
            StoreError: the master does not react.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write_eof()
                    await reader.read()
                finally:
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError) as error:
            raise StoreError(
                f"Mooncake master {self._host}:{self._port} does not answer"
            ) from error

    async def aclose(self) -> None:
        """Close the connection. Idempotent.

        Cancellation: the connection is closed all the same.
        """
        self._is_closed = True
        async with self._connecting:
            if self._transport is not None and self._closed is not None:
                self._transport.close()
                await asyncio.shield(self._closed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the new connection."""
        self._transport = transport
        self._closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; the next operation connects again."""
        self._transport = None
        if self._closed is not None:
            self._closed.set_result(None)
