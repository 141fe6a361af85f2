"""Batch: the leases that the model computes with, step after step."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, final

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

_FIRST_CAPACITY: Final = 64  # rows before the first growth


class Rows(NamedTuple, Generic[LeaseT]):
    """Rows of a batch. They do not change while a ``ComputeBatch`` uses them.

    Attributes:
        members: leases, as they were added.
        records: their records.
        keys: a number per row that no other row of the batch has had.
        ids: ids of the leases, with room behind them.
    """

    members: list[LeaseT]
    records: list[LeaseRecord]
    keys: list[int]
    ids: NDArray[np.int64]

    def copy(self) -> Rows[LeaseT]:
        """Return rows of their own lists."""
        return Rows(self.members[:], self.records[:], self.keys[:], self.ids.copy())


@final
class Batch(Unique, Generic[LeaseT]):
    """Ordered set of leases that the model computes with, step after step.

    ``engine.batch()`` makes one. Where a method takes leases, a batch costs the same time however
    many leases it has::

        batch = engine.batch()
        ...
        batch.add(lease)
        while batch:
            with engine.computing(batch) as step:
                tokens = await step.run(model, engine.block_tables(batch))
            for lease in engine.advance(step, tokens):
                ...  # no room: preempt it

    Rows are the places of the leases, from 0. ``add`` appends a row. ``remove`` moves the rows
    behind it forward, and so does ``drop_released``; nothing else changes the row of a lease.
    ``engine.computing`` calls ``drop_released`` when its block is entered, and keeps the rows of
    that time: ``advance`` finds the leases of the tokens by them, although leases have been added,
    removed and released meanwhile. So compute the inputs of a step inside the block.

    Remove a lease before it is preempted. A batch keeps its leases from being garbage-collected.
    Change a batch in one thread at a time.

    Attributes:
        was_computed: ``engine.computing`` has had the batch, so ``advance`` takes what it returned.
    """

    __slots__ = (
        "_are_kept",
        "_leases",
        "_next_key",
        "_releases",
        "_resolve",
        "_rows",
        "_view",
        "was_computed",
    )

    def __init__(
        self,
        leases: Leases,
        resolve: Callable[[LeaseT], LeaseRecord],
        members: Sequence[LeaseT] = (),
    ) -> None:
        self._leases = leases
        self._resolve = resolve
        self._rows: Rows[LeaseT] = Rows([], [], [], np.empty(_FIRST_CAPACITY, np.int64))
        self._are_kept = False  # whether a ComputeBatch uses the rows
        self._next_key = count()
        self.was_computed = False
        self._view = self._rows.ids[:0]
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
        if lease in self._rows.members:
            raise UsageError(f"add: {record!r} is in the batch already")
        members, records, keys, ids = self._own_rows()
        row = len(members)
        if row == len(ids):
            ids = np.concatenate((ids, np.empty_like(ids)))
            self._rows = self._rows._replace(ids=ids)
        ids[row] = record.number
        members.append(lease)
        records.append(record)
        keys.append(next(self._next_key))
        self._view = ids[: row + 1]

    def remove(self, lease: LeaseT) -> None:
        """Remove a lease, which may be released; the rows behind it move forward.

        Raises:
            UsageError: the batch does not have the lease. Nothing changed.
        """
        try:
            row = self._rows.members.index(lease)
        except ValueError:
            raise UsageError(f"remove: the batch does not have {lease!r}") from None
        members, records, keys, ids = self._own_rows()
        del members[row], records[row], keys[row]
        ids[row : len(members)] = ids[row + 1 : len(members) + 1]
        self._view = ids[: len(members)]

    def drop_released(self) -> None:
        """Remove the leases that are released; the rows behind them move forward."""
        if self._releases == self._leases.num_ended:
            return
        self._releases = self._leases.num_ended
        live = [row for row, record in enumerate(self._rows.records) if record.id]
        if len(live) < len(self):
            members, records, keys, ids = self._own_rows()
            members[:] = [members[row] for row in live]
            records[:] = [records[row] for row in live]
            keys[:] = [keys[row] for row in live]
            ids[: len(live)] = ids[live]
            self._view = ids[: len(live)]

    def _own_rows(self) -> Rows[LeaseT]:
        """Return rows that may be changed."""
        if self._are_kept:
            self._rows = self._rows.copy()
            self._are_kept = False
        return self._rows

    def __len__(self) -> int:
        return len(self._rows.members)

    def __iter__(self) -> Iterator[LeaseT]:
        return iter(self._rows.members)

    def __getitem__(self, row: int) -> LeaseT:
        return self._rows.members[row]

    def __contains__(self, lease: object) -> bool:
        return lease in self._rows.members

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
    def rows(self) -> Rows[LeaseT]:
        """Rows of now, valid until the batch changes."""
        return self._rows

    def keep_rows(self) -> Rows[LeaseT]:
        """Return the rows of now, which later changes of the batch do not change."""
        self.was_computed = self._are_kept = True
        return self._rows

    def removed_since(self, rows: Rows[LeaseT]) -> list[int]:
        """Return the rows of ``keep_rows`` whose leases have been removed since."""
        if rows is self._rows:
            return []
        keys = set(self._rows.keys)
        return [row for row, key in enumerate(rows.keys) if key not in keys]

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} leases>"
