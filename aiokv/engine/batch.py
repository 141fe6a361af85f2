"""Batch: the leases that the model computes with, step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import numpy as np

from aiokv.base.checks import Unique
from aiokv.errors import LeaseError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from aiokv.engine.lease import Lease
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.leases import Leases


LeaseT = TypeVar("LeaseT")
HandleT = TypeVar("HandleT")

_FIRST_CAPACITY: Final = 64  # leases


@final
class Batch(Unique, Generic[LeaseT]):
    """Ordered set of leases that the model computes with, step after step.

    ``engine.batch()`` makes one. Where a method takes leases, a batch costs the same time however
    many leases it has::

        batch = engine.batch()
        ...
        batch.add(lease)  # computed up to the last position of its prompt
        while batch:
            with engine.computing(batch) as computing:
                tokens = await computing.run(model, engine.block_tables(batch))
            for lease in engine.advance(batch, tokens):
                ...  # no room: preempt it

    Rows are the places of the leases, from 0. ``add`` appends a row. ``remove`` moves the rows
    behind it forward, and so does ``drop_released``; nothing else changes the row of a lease. A
    lease that is released keeps its row, so that the tokens of a step find their leases although
    clients have left meanwhile: ``advance`` skips its row, and ``block_tables`` fills it.
    ``engine.computing`` calls ``drop_released`` when its block is entered. So compute the inputs of
    a step inside the block.

    Remove a lease before it is preempted. A batch keeps its leases from being garbage-collected.
    Change a batch in one thread at a time.
    """

    __slots__ = ("_ids", "_leases", "_members", "_records", "_releases", "_resolve", "_view")

    def __init__(
        self,
        leases: Leases,
        resolve: Callable[[LeaseT], LeaseRecord],
        members: Sequence[LeaseT] = (),
    ) -> None:
        self._leases = leases
        self._resolve = resolve
        self._members: list[LeaseT] = []
        self._records: list[LeaseRecord] = []
        self._ids: NDArray[np.int64] = np.empty(_FIRST_CAPACITY, np.int64)
        self._view = self._ids[:0]
        self._releases = leases.num_ended  # when the rows were last searched for released leases
        for lease in members:
            self.add(lease)

    def add(self, lease: LeaseT) -> None:
        """Append a lease.

        Raises:
            UsageError: ``lease`` is not a lease, or is in the batch already. Nothing changed.
            LeaseError: the lease is released, or belongs to another engine. Nothing changed.
        """
        record = self._resolve(lease)
        if lease in self._members:
            raise UsageError(f"add: {record!r} is in the batch already")
        row = len(self._members)
        if row == len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
        self._ids[row] = record.number
        self._members.append(lease)
        self._records.append(record)
        self._view = self._ids[: row + 1]

    def remove(self, lease: LeaseT) -> None:
        """Remove a lease, which may be released; the rows behind it move forward.

        Raises:
            UsageError: the batch does not have the lease. Nothing changed.
        """
        try:
            row = self._members.index(lease)
        except ValueError:
            raise UsageError(f"remove: the batch does not have {lease!r}") from None
        del self._members[row], self._records[row]
        self._ids[row : len(self._members)] = self._ids[row + 1 : len(self._members) + 1]
        self._view = self._ids[: len(self._members)]

    def drop_released(self) -> None:
        """Remove the leases that are released; the rows behind them move forward."""
        if self._releases == self._leases.num_ended:
            return
        self._releases = self._leases.num_ended
        kept = [row for row, record in enumerate(self._records) if record.id]
        if len(kept) < len(self._members):
            self._members = [self._members[row] for row in kept]
            self._records = [self._records[row] for row in kept]
            self._ids[: len(kept)] = self._ids[kept]
            self._view = self._ids[: len(kept)]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[LeaseT]:
        return iter(self._members)

    def __getitem__(self, row: int) -> LeaseT:
        return self._members[row]

    def __contains__(self, lease: object) -> bool:
        return lease in self._members

    def of_handles(self, lease_of: Callable[[HandleT], Lease]) -> Batch[HandleT]:
        """Return an empty batch of objects that stand for leases of the same engine.

        Args:
            lease_of: returns the lease of an object, or raises.
        """
        return Batch(self._leases, lambda handle: self._leases.record_of(lease_of(handle)))

    # --- for the engine -------------------------------------------------------------------------

    def ids_for(self, leases: Leases) -> NDArray[np.int64]:
        """Return the ids of all rows: a view, valid until the batch changes.

        Args:
            leases: leases of the engine that the batch is passed to.

        Raises:
            LeaseError: the batch belongs to another engine.
        """
        if leases is not self._leases:
            raise LeaseError(f"{self!r} belongs to another engine")
        return self._view

    @property
    def records(self) -> Sequence[LeaseRecord]:
        """Records of all rows."""
        return self._records

    def __repr__(self) -> str:
        return f"<Batch of {len(self._members)} leases>"
