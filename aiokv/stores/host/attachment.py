"""Attachment: one engine of the service, its requests, and the slots that it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiokv.base.logs import Log
from aiokv.stores.base import KEY_BYTES, selected
from aiokv.stores.host.messages import (
    NO_SLOT,
    Load,
    Lookup,
    Publish,
    Release,
    Remove,
    Save,
)
from aiokv.stores.host.requests import Requests
from aiokv.wire.frames import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from numpy.typing import NDArray

    from aiokv.stores.host.below import Below
    from aiokv.stores.host.messages import Counts, FromEngine, FromService
    from aiokv.stores.host.pools import SlotPool, SlotPools
    from aiokv.stores.threads import StoreThreads
    from aiokv.wire.connection import Connection

_log: Final = Log(__name__)


class Attachment:
    """One engine: its connection, and the slots that it uses.

    Args:
        pool: slots of the engine's objects.
        pools: reserves slots.
        below: store below; None for none.
        threads: touch new memory.
        share: part of the memory that the objects of the engine may claim.
        counts: returns the counts of the pool.

    Attributes:
        pool: as given.
    """

    def __init__(
        self,
        pool: SlotPool,
        pools: SlotPools,
        below: Below | None,
        threads: StoreThreads,
        share: float,
        counts: Callable[[], Counts],
    ) -> None:
        self.pool = pool
        self._pools = pools
        self._below = below
        self._threads = threads
        self._share = share
        self._requests = Requests(None, self._release, counts)
        self._pinned: dict[int, NDArray[np.int32]] = {}  # slots of loads
        self._reserved: dict[int, tuple[bytes, NDArray[np.int32]]] = {}  # keys, slots of saves

    def start(self, connection: Connection[FromService, FromEngine]) -> None:
        """Serve requests until the connection ends."""
        self._requests.connection = connection
        self.pool.attach(self, self._share)
        _log.info("host.attached", engine=connection.remote, payload_bytes=self.pool.payload_bytes)
        connection.start(self)

    def on_message(self, message: FromEngine) -> None:
        """Begin a request; see ``wire.Handler``."""
        match message:
            case Lookup():
                self._begin(message.number, self._look_up(message.keys))
            case Load():
                self._begin(message.number, self._pin(message.number, message.keys))
            case Save():
                self._begin(message.number, self._reserve(message.number, message.keys))
            case Remove():
                self._begin(message.number, self._remove(message.keys))
            case Publish():
                self._publish(message)
            case Release():
                self._release(message.number)
            case _:
                raise ProtocolError(f"the message {type(message).__name__}")

    def on_closed(self, reason: str) -> None:
        """Free all slots of the engine; see ``wire.Handler``."""
        for number in {*self._requests.numbers, *self._pinned, *self._reserved}:
            self._release(number)
        self.pool.detach(self)
        connection = self._requests.connection
        remote = "" if connection is None else connection.remote
        _log.info("host.detached", engine=remote, reason=reason)

    async def aclose(self) -> None:
        """End the connection and its requests."""
        await self._requests.aclose()

    def _begin(self, number: int, request: Coroutine[Any, Any, bytes]) -> None:
        if number in self._pinned or number in self._reserved:
            request.close()
            raise ProtocolError(f"the number {number} of a request that has not ended")
        self._requests.begin(number, request)

    def _release(self, number: int) -> None:
        """Give back the slots of a request, and end it."""
        self._requests.cancel(number)
        if (pinned := self._pinned.pop(number, None)) is not None:
            self.pool.unpin(pinned)
        if (reserved := self._reserved.pop(number, None)) is not None:
            self.pool.table.release(reserved[1])

    # --- requests ---------------------------------------------------------------------------------

    async def _look_up(self, keys: bytes) -> bytes:
        found = self.pool.table.contains(keys)
        if self._below is not None and not found.all():
            found[~found] = await self._below.lookup(selected(keys, ~found))
        return found.tobytes()

    async def _pin(self, number: int, keys: bytes) -> bytes:
        slots = self.pool.table.pin(keys)
        missing = np.flatnonzero(slots < 0)
        self._pinned[number] = slots[slots >= 0]
        if self._below is not None:
            self._below.note_use(selected(keys, slots >= 0))
        if self._below is not None and len(missing):
            others = selected(keys, missing)
            await self._below.fetch(others)
            slots[missing] = self.pool.table.pin(others)
            self._pinned[number] = slots[slots >= 0]
        slots[slots < 0] = NO_SLOT
        return slots.tobytes()

    async def _reserve(self, number: int, keys: bytes) -> bytes:
        slots = self._pools.wanted(self.pool, keys)
        reserved = slots >= 0
        self._reserved[number] = selected(keys, reserved), slots[reserved]
        # Memory counts to the process that accesses it first, which must be this one.
        if len(new := self.pool.take_new(slots[reserved])):
            await self._threads.run(lambda _: self.pool.memory.touch(new))
        return slots.tobytes()

    def _publish(self, message: Publish) -> None:
        keys, slots = self._reserved.pop(message.number, (b"", None))
        if slots is None or len(slots) != len(message.written):
            raise ProtocolError(f"{len(message.written)} written slots of another request")
        written = np.frombuffer(message.written, np.bool_)
        self.pool.table.release(slots[~written])
        stored = self.pool.commit(selected(keys, written), slots[written])
        if self._below is not None:
            self._below.save_soon(stored)
        self._requests.reply(message.number, b"")

    async def _remove(self, keys: bytes) -> bytes:
        if self._below is not None:
            await self._below.remove(keys)
        self.pool.remove(keys)
        return bytes(len(keys) // KEY_BYTES)
