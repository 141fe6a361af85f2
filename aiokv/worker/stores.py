"""WorkerStores: the stores of one worker, which are open while its host memory is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.base.plan import STORE_ROUTES, group_routes
from aiokv.errors import StoreError, UsageError
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.pools import StorePools
from aiokv.stores.store_set import NOTHING, Found
from aiokv.worker.store_transfers import StoreTransfers

if TYPE_CHECKING:
    from aiokv.base.groups import Retention
    from aiokv.base.plan import GroupRoute
    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.base import StoreFilters
    from aiokv.stores.identity import StoreIdentity
    from aiokv.stores.store_set import StoreAnswer
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.plan_table import PlanTable


class WorkerStores:
    """Stores of one worker: their keys, their plans, and their closing while the host tier sleeps.

    A worker without stores has one, too, which finds nothing, and does not suspend.

    Args:
        stores: opened and closed with the worker; None without stores.
        memory: has the host blocks, and the layout that the keys depend on.
        plans: plans of the worker.
        checksums: checksums of the host blocks; None without.
        has_states: host memory has slots of recurrent state.

    Attributes:
        exist: False without stores.
        routes: routes between host memory and stores; empty without stores.
        transfers: plans between host memory and stores.
    """

    def __init__(
        self,
        stores: StorePools | None,
        memory: WorkerMemory,
        plans: PlanTable,
        checksums: Checksums | None,
        *,
        has_states: bool = False,
    ) -> None:
        self.exist = stores is not None
        self.routes: frozenset[GroupRoute] = frozenset()
        if self.exist:
            retentions: tuple[Retention, ...] = ("all", "window")
            retentions += ("last",) if has_states else ()
            self.routes = group_routes(*STORE_ROUTES, retentions=retentions)
        self._stores = StorePools(()) if stores is None else stores
        self._memory = memory
        self._identity: StoreIdentity | None = None
        self._is_asleep = False
        self._answers = False  # True from the end of open() until end_lookups()
        self.transfers = StoreTransfers(self._stores, plans, checksums)

    async def open(self, identity: StoreIdentity | None) -> None:
        """Open the stores on the host memory, which was allocated before.

        Raises:
            AiokvError: as ``StoreSet.open``; all are closed.
            UsageError: ``identity`` is None.

        Cancellation: all are closed.
        """
        if not self.exist:
            return
        self._identity = identity
        await self._stores.open(self._memory.store_memories, self._fingerprint)
        self._answers = True

    def may_have(self, digest: bytes) -> bool:
        """Return False if no store has a block; see :meth:`StoreSet.may_have`."""
        return not self._answers or self._stores.may_have(digest)

    def is_lacking(self, digest: bytes) -> bool:
        """Return True if no store has a block; see :meth:`StoreSet.is_lacking`."""
        return self._stores.is_lacking(digest)

    def shared_filters(self) -> StoreFilters | None:
        """Return what tells which blocks no store has; see :meth:`StoreSet.shared_filters`."""
        return self._stores.shared_filters() if self.exist and self._answers else None

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Ask the stores for blocks; see :meth:`StoreSet.lookup`."""
        return await self._stores.lookup(digests) if self._answers else NOTHING

    async def find(self, group: str, digests: bytes) -> Found:
        """Ask the stores for objects of a group; see :meth:`StoreSet.find`."""
        if not self._answers:
            return Found.nothing(len(digests) // KEY_BYTES)
        return await self._stores.find(group, digests)

    def end_lookups(self) -> None:
        """Find nothing from now on: the worker closes. Idempotent."""
        self._answers = False

    def change_weights(self, version: str) -> None:
        """Use other keys from now on; see :meth:`Worker.change_weights`."""
        if self._identity is not None:
            self._identity = msgspec.structs.replace(self._identity, weights_version=version)
            self._stores.change_fingerprints(self._fingerprint)

    async def purge(self, label: bytes) -> int:
        """Remove all objects with a label; see :meth:`StoreLookups.purge`.

        Raises:
            StoreError: a store was not purged, or host memory is asleep.
        """
        if not self.exist:
            return 0
        if self._is_asleep or not self._answers:
            raise StoreError("the stores are closed while host memory is asleep")
        return await self._stores.purge(label)

    def _fingerprint(self, group: str) -> bytes:
        if self._identity is None:
            raise UsageError("open: identity is None; stores need it", hint="pass a StoreIdentity")
        return self._identity.fingerprint(self._memory.regions, group)

    async def sleep(self) -> None:
        """Close the stores until ``wake_up``: the host memory will be freed.

        Cancellation: call it again, or ``wake_up``.
        """
        self._is_asleep = True
        await self._stores.aclose()

    async def wake_up(self) -> None:
        """Open the stores again after ``sleep``, if the host memory is allocated again.

        Cancellation: call it again, or ``sleep``.
        """
        if self.exist and self._is_asleep and "host" not in self._memory.asleep:
            await self._stores.reopen(self._memory.store_memories, self._fingerprint)
            self._is_asleep = False

    async def aclose(self) -> None:
        """Wait for the plans in flight, and close the stores. Idempotent.

        Cancellation: call it again.
        """
        await self.transfers.finish()
        await self._stores.aclose()
        await self.transfers.aclose()

    def close_without_loop(self) -> None:
        """As ``aclose``, after the loop was closed: nothing is reported."""
        self._stores.close_without_loop()

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order."""
        return self._stores.statistics()
