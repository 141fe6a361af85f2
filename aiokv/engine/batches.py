"""Batches: the methods of ``CacheEngine`` on several leases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiokv.base import checks
from aiokv.base.types import as_step_tokens
from aiokv.engine.batch import Batch
from aiokv.engine.computing import ComputeBatch
from aiokv.errors import UsageError, WouldBlock
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from aiokv.base.types import LeaseIds, StepTokenIds, StepTokens, TokenIds
    from aiokv.engine.batch import Rows
    from aiokv.engine.computing import Computing
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.lease import Lease
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.leases import Leases
    from aiokv.engine.parts import Parts

    AnyLeases = Batch[Any] | Iterable[Lease]

LeaseT = TypeVar("LeaseT")


class Batches:
    """Makes the transitions of several leases; see ``CacheEngine`` for the methods."""

    def __init__(
        self, parts: Parts, leases: Leases, computing: Computing, expiries: Expiries
    ) -> None:
        self._lifetime = parts.lifetime
        self._read = parts.scheduler.read
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._leases = leases
        self._computing = computing
        self._expiries = expiries

    def new(self, leases: Iterable[Lease]) -> Batch[Lease]:
        """See ``CacheEngine.batch``."""
        return Batch(self._leases, self._leases.record_of, checks.sequence("leases", leases))

    def advance(
        self,
        batch: ComputeBatch[LeaseT] | Batch[LeaseT],
        tokens: StepTokenIds,
        counts: TokenIds | None,
        draft_tokens: int,
    ) -> tuple[LeaseT, ...]:
        """See ``CacheEngine.advance``."""
        self._lifetime.check_loop()
        rows, removed = self._rows_of(batch)
        lease_ids = rows.ids[: len(rows.members)]
        step_tokens = as_step_tokens(tokens, counts, len(lease_ids), removed)
        if type(draft_tokens) is not int:
            draft_tokens = checks.integer("draft_tokens", draft_tokens)
        leases = self._leases
        if leases.coverage.active:
            self._check_coverage(rows.records, lease_ids, step_tokens)
        refused = self._dispatcher.apply(
            self._scheduler.advance_batch(lease_ids, *step_tokens, draft_tokens)
        )
        if self._expiries.timers:
            numbers = step_tokens.counts
            advanced = np.full(len(lease_ids), True) if numbers is None else numbers > 0
            advanced[list(refused)] = False
            self._expiries.stop_all(lease_ids[advanced])
        if leases.tickets:
            for lease_id in lease_ids.tolist():
                leases.peer_tickets.committed(lease_id)
        return tuple([rows.members[row] for row in refused])

    def _rows_of(
        self, batch: ComputeBatch[LeaseT] | Batch[LeaseT]
    ) -> tuple[Rows[LeaseT], list[int]]:
        """Return the rows of a step's tokens, and those whose leases have been removed since.

        Raises:
            UsageError, LeaseError: see ``CacheEngine.advance``.
        """
        if isinstance(batch, Batch):
            batch.ids_for(self._leases)
            if batch.was_computed:
                raise UsageError(
                    f"advance: engine.computing has had {batch!r}, whose rows may have changed "
                    "since",
                    hint="pass the ComputeBatch: with engine.computing(batch) as step: ...; "
                    "engine.advance(step, tokens)",
                )
            return batch.rows, []
        if not isinstance(batch, ComputeBatch):
            raise UsageError(f"advance: batch is {batch!r}; it must be a ComputeBatch or a Batch")
        if batch.batch is None or batch.rows is None:
            raise UsageError(
                f"advance: {batch!r} has no rows",
                hint="pass a Batch to engine.computing, and enter its `with` block before",
            )
        batch.batch.ids_for(self._leases)
        return batch.rows, batch.batch.removed_since(batch.rows)

    def _check_coverage(
        self,
        records: Sequence[LeaseRecord],
        lease_ids: NDArray[np.int64],
        step_tokens: StepTokens,
    ) -> None:
        """Warn about positions that the step would commit, and that no batch covers."""
        lengths = self._read.lengths(lease_ids)
        counts, width = step_tokens.counts, step_tokens.width
        added = np.full(len(lengths), width) if counts is None else counts
        for record, length, count in zip(records, lengths, added, strict=True):
            if record.id and count > 0:
                self._leases.coverage.check_commit(record, int(length + count - 1))

    def extend(self, leases: AnyLeases, num_tokens: int) -> None:
        """See ``CacheEngine.extend``."""
        self._lifetime.check_loop()
        lease_ids = self._ids_of(leases)
        num_tokens = checks.integer("num_tokens", num_tokens)
        if not self._dispatcher.apply(self._scheduler.extend(lease_ids, num_tokens)):
            raise WouldBlock(
                f"extend: no room for {num_tokens} more positions of {len(lease_ids)} leases",
                hint="preempt a lease, or raise CacheConfig.reserve_blocks",
            )
        if self._expiries.timers:
            self._expiries.stop_all(lease_ids)

    def computing(self, leases: Batch[LeaseT] | Iterable[LeaseT]) -> ComputeBatch[LeaseT]:
        """See ``CacheEngine.computing``."""
        self._lifetime.check_loop()
        if isinstance(leases, Batch):
            return ComputeBatch(self._computing, partial(self._live_ids, leases), leases)
        named: list[Any] = checks.sequence("leases", leases)
        return ComputeBatch(self._computing, lambda: self._leases.lease_ids(named))

    def _live_ids(self, batch: Batch[Any]) -> LeaseIds:
        batch.drop_released()
        return batch.ids_for(self._leases)

    def layers(self, leases: AnyLeases) -> LayerView:
        """See ``CacheEngine.layers``."""
        self._lifetime.check_loop()
        if isinstance(leases, Batch):
            leases.ids_for(self._leases)
            records = leases.rows.records
        else:
            records = [self._leases.record_of(lease) for lease in checks.sequence("leases", leases)]
        return LayerView.of_batch(record.layers for record in records) or self._leases.done

    def lengths(self, leases: AnyLeases) -> NDArray[np.int32]:
        """See ``CacheEngine.lengths``."""
        self._lifetime.check_loop()
        return self._read.lengths(self._ids_of(leases))

    def _ids_of(self, leases: AnyLeases) -> LeaseIds:
        if isinstance(leases, Batch):
            return leases.ids_for(self._leases)
        return self._leases.lease_ids(leases)

    def block_tables(
        self,
        leases: AnyLeases,
        out: NDArray[np.int32] | None,
        fill: int,
        group: str | None,
    ) -> NDArray[np.int32]:
        """See ``CacheEngine.block_tables``."""
        self._lifetime.check_loop()
        ids = self._ids_of(leases)
        fill = checks.integer("fill", fill, minimum=-(2**31), maximum=checks.MAX_INT32)
        if group is not None:
            checks.text("group", group)
        if out is None:
            out = np.empty((len(ids), self._read.longest_table(ids)), dtype=np.int32)
        try:
            self._read.block_tables(ids, out, fill, group)
        except TypeError:
            raise UsageError(
                f"block_tables: out is {_described(out)}; it must be a writable C-contiguous int32 "
                "array of two dimensions in host memory"
            ) from None
        return out


def _described(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return repr(array)
    order = "C" if array.flags.c_contiguous else "not C"
    access = "writable" if array.flags.writeable else "read-only"
    return f"{array.dtype} of shape {array.shape}, {order}-contiguous, {access}"
