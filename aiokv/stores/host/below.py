"""Below: the store below the shared memory, for objects of one size.

The service saves new objects to the store in the background, and loads those that were evicted from
memory, or that an earlier service had. Objects pass through blocks of their own, since a store may
lock its blocks in memory, and memory of the service moves between sizes.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.base.logs import Log
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory, selected, split_keys
from aiokv.stores.guard import StoreGuard
from aiokv.stores.proof import Proof

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.stores.guard import Costs
    from aiokv.stores.host.pools import SlotPool, SlotPools
    from aiokv.stores.threads import StoreThreads
    from aiokv.stores.use import StoreUse

_log: Final = Log(__name__)
_STAGING_BYTES: Final = 64 << 20
_MAX_BLOCKS: Final = 256  # of one load or save
_MAX_QUEUED: Final = 1 << 17  # keys that wait for a save
_CLOSE_SECONDS: Final = 10.0  # for the queued saves


class Below:
    """The part of a store that has the objects of one pool. Used on one loop.

    Args:
        use: the part of the store for objects of this size, not opened.
        pool: slots of the objects.
        pools: reserves the slots of loaded objects.
        threads: copy objects.
        share: part of the limit of the store that the objects may take.
        costs: those of the store, for all pools.

    Attributes:
        saved_blocks: objects that were saved.
        loaded_blocks: objects that were loaded.
        dropped_blocks: objects that were not saved, because too many waited or a save raised.
    """

    def __init__(
        self,
        use: StoreUse,
        pool: SlotPool,
        pools: SlotPools,
        threads: StoreThreads,
        share: float,
        costs: Costs | None,
    ) -> None:
        self.saved_blocks = self.loaded_blocks = self.dropped_blocks = 0
        self._store = use.store
        self._guard = StoreGuard(use, costs)
        self._pool = pool
        self._pools = pools
        self._threads = threads
        count = max(2, min(2 * _MAX_BLOCKS, _STAGING_BYTES // pool.pitch_bytes))
        self._memory = StoreMemory.allocate(count, pool.payload_bytes, pool.pitch_bytes, share)
        self._proof = Proof(self._memory)
        blocks = np.arange(count, dtype=np.int32)
        self._save_blocks, self._load_blocks = blocks[: count // 2], blocks[count // 2 :]
        self._loading = asyncio.Lock()
        self._loads = Accesses()
        self._saving = asyncio.Lock()
        self._queue: dict[bytes, None] = {}  # keys to save, in order
        self._refused: dict[bytes, None] = {}  # by the write budget
        self._queued = asyncio.Event()
        self._is_closing = False
        self._saver: asyncio.Task[None] | None = None

    async def opened(self) -> Below:
        """Open the store, and return this object; see ``StoreGuard.open``.

        Raises:
            AiokvError: the store is configured wrongly.
        """
        await self._guard.open(self._memory, self._proof)
        self._saver = asyncio.create_task(self._run_saves())
        return self

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        """Return for each key whether the store has it."""
        return await self._guard.lookup(keys)

    async def fetch(self, keys: bytes) -> None:
        """Load the objects that the store has into slots.

        Cancellation: takes effect when no slot is being written.
        """
        step = len(self._load_blocks)
        async with self._loading:
            for first in range(0, len(keys) // KEY_BYTES, step):
                part = keys[first * KEY_BYTES : (first + step) * KEY_BYTES]
                if not await self._fetch_part(part):
                    return

    async def _fetch_part(self, keys: bytes) -> bool:
        """Load a part of a batch; return False if the store has none of it."""
        blocks = self._load_blocks[: len(keys) // KEY_BYTES]
        if earlier := self._loads.in_flight:  # of a cancelled call; they may write the blocks
            await asyncio.wait(earlier)
        results, overdue = await self._guard.load(keys, blocks, accesses=self._loads)
        if overdue is not None:
            await asyncio.wait({overdue})  # until then, it may write the blocks
        loaded = np.flatnonzero(results == Result.DONE)
        slots = self._pools.reserve(self._pool, len(loaded))
        loaded = loaded[: len(slots)]
        keys = selected(keys, loaded)

        def copy() -> NDArray[np.uint8]:
            return self._pool.memory.save(keys, slots, self._memory, blocks[loaded])

        try:
            copied = (await self._threads.run(lambda _: copy())) == Result.DONE
        except BaseException:
            self._pool.table.release(slots)
            raise
        self._pool.table.release(slots[~copied])
        self._pool.commit(selected(keys, copied), slots[copied])
        self.loaded_blocks += int(copied.sum())
        return len(loaded) > 0

    async def remove(self, keys: bytes) -> None:
        """Remove objects, also those that wait to be saved.

        Raises:
            StoreError: they could not be removed.
        """
        async with self._loading, self._saving:
            for key in split_keys(keys):
                self._queue.pop(key, None)
            await self._store.remove(keys)

    async def purge(self, label: bytes) -> int:
        """Remove the objects with a label, also those that wait to be saved; return their number.

        Raises:
            StoreError: they could not be removed.
        """
        async with self._loading, self._saving:
            for key in [key for key in self._queue if key.endswith(label)]:
                del self._queue[key]
            return await self._guard.purge(label)

    def save_soon(self, keys: bytes) -> None:
        """Queue objects that are in memory. Those evicted before their turn are not saved."""
        for key in split_keys(keys):
            if len(self._queue) >= _MAX_QUEUED:
                self.dropped_blocks += 1
            else:
                self._queue[key] = None
        self._queued.set()

    def note_use(self, keys: bytes) -> None:
        """Queue the objects of a load that the write budget has refused before."""
        if self._refused:
            again = [key for key in split_keys(keys) if key in self._refused]
            for key in again:
                del self._refused[key]
            self.save_soon(b"".join(again))

    async def _run_saves(self) -> None:
        while self._queue or not self._is_closing:
            if not self._queue:
                self._queued.clear()
                await self._queued.wait()
                continue
            async with self._saving:
                first = list(islice(self._queue, len(self._save_blocks)))
                for key in first:
                    del self._queue[key]
                try:
                    await self._save(b"".join(first))
                except Exception as error:  # the next objects are saved nevertheless
                    self.dropped_blocks += len(first)
                    _log.error("host.save_below_failed", blocks=len(first), exc_info=error)

    async def _save(self, keys: bytes) -> None:
        admitted = self._guard.admit(keys)
        admitted_at = asyncio.get_running_loop().time()
        for key in split_keys(selected(keys, ~admitted))[: _MAX_QUEUED - len(self._refused)]:
            self._refused[key] = None
        keys = selected(keys, admitted)
        num_unsaved = len(keys) // KEY_BYTES
        slots = self._pool.table.pin(keys)
        keys, slots = selected(keys, slots >= 0), slots[slots >= 0]
        blocks = self._save_blocks[: len(slots)]

        def copy() -> NDArray[np.uint8]:
            return self._pool.memory.load(keys, slots, self._memory, blocks)

        try:
            copied = (await self._threads.run(lambda _: copy())) == Result.DONE
            num_unsaved -= int(copied.sum())
        finally:
            self._pool.unpin(slots)
            self._guard.refund(num_unsaved, admitted_at)
        results, overdue = await self._guard.save(
            selected(keys, copied), blocks[copied], admitted_at=admitted_at
        )
        if overdue is not None:
            await asyncio.wait({overdue})  # until then, it reads the blocks
        self.saved_blocks += int((results == Result.DONE).sum())

    async def aclose(self) -> None:
        """Save what waits, for at most 10 s, and close the store."""
        self._is_closing = True
        self._queued.set()
        if self._saver is not None:
            _, unfinished = await asyncio.wait({self._saver}, timeout=_CLOSE_SECONDS)
            if unfinished:
                _log.warning("host.not_saved_below", blocks=len(self._queue))
                self._saver.cancel()
                await asyncio.wait(unfinished)
        await self._guard.aclose()
        self._proof.close()
