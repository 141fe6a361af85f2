"""StorePools: the stores of a worker, for the host memory of each group.

The copies of a group have one size. Its objects have keys of their own, and each store has a part
of its own for each group: the store that the user has made for ``"attention"``, and its
``for_group`` for the others. So no object of one group is ever found in another one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from aiokv.base.groups import ATTENTION
from aiokv.base.logs import Log
from aiokv.stores.store_set import StoreSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.accesses import Accesses
    from aiokv.stores.base import StoreFilters, StoreMemory
    from aiokv.stores.store_set import Fetched, Found, Saved, StoreAnswer
    from aiokv.stores.use import StoreUse

    Fingerprints = Callable[[str], bytes]

log = Log(__name__)


class StorePools:
    """One :class:`StoreSet` per group. Used on one loop.

    Args:
        stores: in the order in which objects are taken from them.
    """

    def __init__(self, stores: Sequence[StoreUse]) -> None:
        self._stores = stores
        self._sets: dict[str, StoreSet] = {ATTENTION: StoreSet(stores)}

    async def open(self, memories: Mapping[str, StoreMemory], fingerprint: Fingerprints) -> None:
        """Open all stores on host memory.

        Args:
            memories: host memory by group.
            fingerprint: fingerprint of the objects of a group.

        Raises:
            AiokvError: as ``StoreSet.open``; all are closed.

        Cancellation: all are closed.
        """
        for group in memories:
            if group not in self._sets:
                self._sets[group] = self._part(group)
        try:
            for group, stores in self._sets.items():
                await stores.open(memories[group], fingerprint(group))
        except BaseException:
            await self.aclose()
            raise

    def _part(self, group: str) -> StoreSet:
        """Return the parts of the stores for an auxiliary group, which share their costs."""
        parts, shared = [], []
        for use, costs in zip(self._stores, self._sets[ATTENTION].costs, strict=True):
            part = use.store.for_group(group)
            if part is None:
                log.warning("store.has_no_group", url=use.store.url, group=group)
            else:
                parts.append(replace(use, store=part))
                shared.append(costs)
        return StoreSet(parts, shared)

    async def reopen(self, memories: Mapping[str, StoreMemory], fingerprint: Fingerprints) -> None:
        """Open the closed stores on new memory; see ``StoreSet.reopen``."""
        fingerprints = {group: fingerprint(group) for group in self._sets}
        await asyncio.gather(
            *(
                stores.reopen(memories[group], fingerprints[group])
                for group, stores in self._sets.items()
            )
        )

    def change_fingerprints(self, fingerprint: Fingerprints) -> None:
        """Use other keys from now on. Fetches in flight bring nothing."""
        for group, stores in self._sets.items():
            stores.change_fingerprint(fingerprint(group))

    async def aclose(self) -> bool:
        """Cancel operations in flight and close all stores; see ``StoreSet.aclose``. Idempotent."""
        ends = [await stores.aclose() for stores in self._sets.values()]
        return all(ends)

    def close_without_loop(self) -> bool:
        """As ``aclose``, after the loop was closed: the stores themselves stay open."""
        ends = [stores.close_without_loop() for stores in self._sets.values()]
        return all(ends)

    def may_have(self, digest: bytes) -> bool:
        """Return False if no store has a block; see ``StoreSet.may_have``."""
        return self._sets[ATTENTION].may_have(digest)

    def is_lacking(self, digest: bytes) -> bool:
        """Return True if no store has a block; see ``StoreSet.is_lacking``."""
        return self._sets[ATTENTION].is_lacking(digest)

    def shared_filters(self) -> StoreFilters | None:
        """Return the filters of the blocks; see ``StoreSet.shared_filters``."""
        return self._sets[ATTENTION].shared_filters()

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Return how many leading blocks the stores have; see ``StoreSet.lookup``."""
        return await self._sets[ATTENTION].lookup(digests)

    async def find(self, group: str, digests: bytes) -> Found:
        """Return which objects of a group the stores have; see ``StoreSet.find``."""
        return await self._sets[group].find(digests)

    async def fetch(self, plan: TransferPlan, accesses: Accesses | None = None) -> Fetched:
        """Load the objects of a plan; see ``StoreSet.fetch``."""
        return await self._sets[plan.group].fetch(plan, accesses)

    async def save(self, plan: TransferPlan, accesses: Accesses | None = None) -> Saved:
        """Save the objects of a plan; see ``StoreSet.save``."""
        return await self._sets[plan.group].save(plan, accesses)

    async def purge(self, label: bytes) -> int:
        """Remove all objects with a label; see ``StoreSet.purge``. Returns their number."""
        return sum([await stores.purge(label) for stores in self._sets.values()])

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order: of blocks, then of the other groups."""
        return [guard for stores in self._sets.values() for guard in stores.statistics()]
