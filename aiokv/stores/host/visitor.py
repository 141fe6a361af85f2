"""Visitor: a process that asks about objects of all sizes, and moves none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.stores.host.messages import Newest, Purge
from aiokv.stores.host.requests import Requests
from aiokv.wire.frames import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiokv.stores.host.messages import FromEngine, FromService
    from aiokv.stores.host.pools import SlotPools
    from aiokv.wire.connection import Connection


class Visitor:
    """One connection.

    Args:
        pools: the objects in memory.
        purge: removes the objects of all pools with a label; returns their number.
        connection: the connection.
    """

    def __init__(
        self,
        pools: SlotPools,
        purge: Callable[[bytes], Awaitable[int]],
        connection: Connection[FromService, FromEngine],
    ) -> None:
        self._pools = pools
        self._purge = purge
        self._requests = Requests()
        self._requests.connection = connection
        connection.start(self)

    def on_message(self, message: FromEngine) -> None:
        """Begin a request; see ``wire.Handler``."""
        match message:
            case Purge():
                self._requests.begin(message.number, self._purged(message.label))
            case Newest():
                pool = self._pools.pools.get((message.payload_bytes, message.pitch_bytes))
                keys = b"" if pool is None else pool.table.newest(message.count)
                self._requests.reply(message.number, keys)
            case _:
                raise ProtocolError(f"the message {type(message).__name__} without Hello")

    def on_closed(self, reason: str) -> None:
        """End the requests; see ``wire.Handler``."""
        for number in self._requests.numbers:
            self._requests.cancel(number)

    async def aclose(self) -> None:
        """End the connection and its requests."""
        await self._requests.aclose("the service is closing")

    async def _purged(self, label: bytes) -> bytes:
        return (await self._purge(label)).to_bytes(8, "little")
