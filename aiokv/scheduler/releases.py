"""Releases: ends leases, and the batches that keep the blocks of released leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import LeaseError
from aiokv.scheduler.sharded import SHARDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv._native import Core
    from aiokv.base.types import LeaseIds
    from aiokv.scheduler.admission import Admission
    from aiokv.scheduler.clock import StepClock
    from aiokv.scheduler.owners import Owners
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.quota import SaltQuota


class Releases:
    """Ends the leases of one cache, and counts the batches in flight.

    Blocks that batches or transfers of peers in flight use are freed when these have ended; until
    then, the released lease keeps its name and its part of the quota.

    Args:
        core: state of the leases.
        clock: numbers of the steps.
        owners: names of all existing leases.
        salts: salts of all existing leases; None without a quota.
        lost: leases whose blocks were lost with a rank.
        quota: blocks per salt.
        admission: leases that wait for capacity.
        pending: leases that wait for blocks of other leases.

    Attributes:
        expired_leases: leases that were released because they were not used in time.
    """

    def __init__(
        self,
        core: Core,
        clock: StepClock,
        *,
        owners: Owners,
        salts: dict[int, str] | None,
        lost: dict[int, str],
        quota: SaltQuota,
        admission: Admission,
        pending: PendingBlocks,
    ) -> None:
        self._core = core
        self._clock = clock
        self._owners = owners
        self._salts = salts
        self._lost = lost
        self._quota = quota
        self._admission = admission
        self._pending = pending
        self._requests = admission.requests
        self._waiters = pending.waiters
        self._batches: set[int] = set()  # ids of the batches in flight
        self.expired_leases = 0

    def release(self, lease_id: int, used_in: int = 0, returns: str = "") -> None:
        """Give back the blocks of a lease. Blocks in use follow when their use ends.

        Args:
            lease_id: the lease.
            used_in: closed step that used the blocks, in addition to batches; 0 for none.
            returns: label of the request; see ``Lease.release``.
        """
        if self._core.release(lease_id, used_in or self._clock.open, used_in, returns):
            self._forget(lease_id)
        if self._waiters:
            self._pending.withdrawn(lease_id)

    def end_waits(self, lease_id: int) -> bool:
        """Fail the waits of a lease that is being released; return False if there are none."""
        if lease_id not in self._requests and lease_id not in self._waiters:
            return False
        error = LeaseError(f"lease {self._owners.name(lease_id)!r} was released while it waited")
        self._pending.fail(lease_id, error)
        self._admission.refuse(lease_id, error)
        return True

    def begin_batch(self, lease_ids: LeaseIds) -> int:
        """Begin a batch that uses the blocks of these leases; return its number.

        Raises:
            LeaseError: a lease is not granted, is being swapped, or is listed twice.
        """
        batch_id = self._core.begin_batch(lease_ids)
        self._batches.add(batch_id)
        return batch_id

    def end_batch(self, batch_id: int, step: int) -> None:
        """End a batch and free the blocks of its released leases. Idempotent.

        Args:
            batch_id: the batch.
            step: step whose end frees the blocks; 0 to free them now.
        """
        if batch_id in self._batches:
            self._batches.remove(batch_id)
            self.forget(self._core.end_batch(batch_id, step))

    def forget(self, freed: Iterable[int]) -> None:
        """Remove released leases whose batches and transfers have ended.

        Args:
            freed: leases that the core has freed.
        """
        for lease_id in freed:
            self._forget(lease_id)
            self._pending.withdrawn(lease_id)

    def _forget(self, lease_id: int) -> None:
        """Remove a lease that has given back all its blocks. Idempotent."""
        self._owners.shards[lease_id % SHARDS].pop(lease_id, None)
        if self._lost:
            self._lost.pop(lease_id, None)
        if self._salts is not None:
            self._salts.pop(lease_id, None)
            self._quota.give_back(lease_id)
