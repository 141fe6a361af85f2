"""Calls between the front of the split demo and its servers, over socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    Handlers = Mapping[str, Callable[..., Awaitable[Any]]]

_LENGTH_BYTES: Final = 4
_OPEN: Final = b"+"


class ServerLostError(Exception):
    """A process has ended before it answered."""


class Channel:
    """Calls of functions of another process of the demo, in both directions.

    Attributes:
        is_lost: the other side has closed the channel or has ended; further calls fail.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.is_lost = False

    @classmethod
    async def over(cls, connection: socket.socket) -> Channel:
        """Return a channel over one end of a socket pair, which the channel closes."""
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def open(self) -> None:
        """Tell the other side that calls are answered from now on. One side calls this, once."""
        self._writer.write(_OPEN)

    async def opened(self) -> bool:
        """Wait for ``open`` of the other side; return False if it has ended before."""
        return await self._reader.read(len(_OPEN)) == _OPEN

    async def call(self, name: str, *args: object) -> Any:
        """Call a handler of the other side and return its result.

        Raises:
            ServerLostError: the other side has ended.

        Cancellation: the handler goes on.
        """
        if self.is_lost:
            raise ServerLostError
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(number, name, args)
        return await answer

    async def run(self, group: asyncio.TaskGroup, handlers: Handlers) -> None:
        """Answer calls until the other side closes the channel or ends.

        Args:
            group: gets a task per call.
            handlers: functions that the other side may call, by name.
        """
        try:
            while True:
                header = await self._reader.readexactly(_LENGTH_BYTES)
                blob = await self._reader.readexactly(int.from_bytes(header))
                number, name, value = pickle.loads(blob)
                if name:
                    group.create_task(self._answer(number, handlers[name](*value)))
                elif not (answer := self._answers.pop(number)).done():
                    answer.set_result(value)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_lost = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ServerLostError())

    async def aclose(self) -> None:
        """Send the end of the channel behind all answers. Idempotent."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _answer(self, number: int, result: Awaitable[Any]) -> None:
        self._send(number, "", await result)

    def _send(self, number: int, name: str, value: object) -> None:
        if self._writer.is_closing():
            return  # uvloop raises RuntimeError here; ``run`` handles the end
        blob = pickle.dumps((number, name, value))
        self._writer.write(len(blob).to_bytes(_LENGTH_BYTES) + blob)
