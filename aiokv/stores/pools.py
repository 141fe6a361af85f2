"""StorePools: the stores of a worker, for each pool of host memory.

A pool has copies of one size: blocks (``"host"``), snapshots of recurrent state (``"host_state"``),
or blocks of a window group (``"host_window:"`` and its name). Its objects have keys of its own, and
each store has a part of its own for each pool: the store that the user has made for blocks, and its
``for_pool`` for the others. So no object of one pool is ever found in another one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiokv.base.logs import Log
from aiokv.stores.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.base.plan import StorePool, TransferPlan
    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.accesses import Accesses
    from aiokv.stores.base import StoreMemory
    from aiokv.stores.store_set import Fetched, Found, Saved, StoreAnswer
    from aiokv.stores.use import StoreUse

    Fingerprints = Callable[[StorePool], bytes]

log = Log(__name__)

BLOCKS: Final = "host"  # the pool that each cache has


class StorePools:
    """One :class:`StoreSet` per pool. Used on one loop.

    Args:
        stores: in the order in which objects are taken from them.
    """

    def __init__(self, stores: Sequence[StoreUse]) -> None:
        self._stores = stores
        self._sets: dict[StorePool, StoreSet] = {BLOCKS: StoreSet(stores)}

    async def open(
        self, memories: Mapping[StorePool, StoreMemory], fingerprint: Fingerprints
    ) -> None:
        """Open all stores on the pools.

        Args:
            memories: host memory by pool.
            fingerprint: of the objects of a pool.

        Raises:
            AiokvError: as ``StoreSet.open``; all are closed.

        Cancellation: all are closed.
        """
        for pool in memories:
            if pool not in self._sets:
                self._sets[pool] = self._part(pool)
        try:
            for pool, stores in self._sets.items():
                await stores.open(memories[pool], fingerprint(pool))
        except BaseException:
            await self.aclose()
            raise

    def _part(self, pool: StorePool) -> StoreSet:
        """Return the parts of the stores for an auxiliary pool, which share their costs."""
        parts, shared = [], []
        for use, costs in zip(self._stores, self._sets[BLOCKS].costs, strict=True):
            part = use.store.for_pool(pool)
            if part is None:
                log.warning("store.has_no_pool", url=use.store.url, pool=pool)
            else:
                parts.append(replace(use, store=part))
                shared.append(costs)
        return StoreSet(parts, shared)

    async def reopen(
        self, memories: Mapping[StorePool, StoreMemory], fingerprint: Fingerprints
    ) -> None:
        """Open the closed stores on new memory; see ``StoreSet.reopen``."""
        fingerprints = {pool: fingerprint(pool) for pool in self._sets}
        await asyncio.gather(
            *(
                stores.reopen(memories[pool], fingerprints[pool])
                for pool, stores in self._sets.items()
            )
        )

    def change_fingerprints(self, fingerprint: Fingerprints) -> None:
        """Use other keys from now on. Fetches in flight bring nothing."""
        for pool, stores in self._sets.items():
            stores.change_fingerprint(fingerprint(pool))

    async def aclose(self) -> bool:
        """Cancel operations in flight and close all stores; see ``StoreSet.aclose``. Idempotent."""
        ends = [await stores.aclose() for stores in self._sets.values()]
        return all(ends)

    def close_without_loop(self) -> bool:
        """As ``aclose``, after the loop was closed: the stores themselves stay open."""
        ends = [stores.close_without_loop() for stores in self._sets.values()]
        return all(ends)

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Return how many leading blocks the stores have; see ``StoreSet.lookup``."""
        return await self._sets[BLOCKS].lookup(digests)

    async def find(self, pool: StorePool, digests: bytes) -> Found:
        """Return which objects of a pool the stores have; see ``StoreSet.find``."""
        return await self._sets[pool].find(digests)

    async def fetch(self, plan: TransferPlan, accesses: Accesses | None = None) -> Fetched:
        """Load the objects of a plan; see ``StoreSet.fetch``."""
        return await self._sets[plan.store_pool].fetch(plan, accesses)

    async def save(self, plan: TransferPlan, accesses: Accesses | None = None) -> Saved:
        """Save the objects of a plan; see ``StoreSet.save``."""
        return await self._sets[plan.store_pool].save(plan, accesses)

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order: of blocks, then of the other pools."""
        return [guard for stores in self._sets.values() for guard in stores.statistics()]
