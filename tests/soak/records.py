"""Records of a round: each transfer, wait and grant ends exactly once, and times are in order."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Self

from aiokv.statistics import LeasePhase, TransferSpan
from tests.soak.load import Violation

if TYPE_CHECKING:
    import random
    from contextvars import Context

    from aiokv import CacheEngine

SHARE = 0.5  # of the engines that have an observer


class RoundRecords:
    """Observer of one engine, in a ``with`` block around its ``async with`` block.

    Raises:
        Violation: at the end of the block, unless an exception ends it.
    """

    def __init__(self, engine: CacheEngine, rng: random.Random) -> None:
        self._engine = engine
        self._is_on = rng.random() < SHARE
        self._ends: Counter[tuple[str, str]] = Counter()  # of transfers, by route and outcome
        self._transfers: set[int] = set()
        self._held: dict[int, float] = defaultdict(float)  # end of the last grant, by lease
        self._violations: list[str] = []

    def __enter__(self) -> Self:
        if self._is_on:
            self._engine.inspect.add_observer(self._note)
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        if exc is not None or not self._is_on:
            return
        for group, transfers in self._engine.statistics().worker.groups.items():
            for route, counts in transfers.routes.items():
                done = self._ends[group, route, "done"]
                if done != counts.done:
                    what = f"{done} records of {group} {route}"
                    self._violations.append(f"{what}, but {counts.done} ended")
        if self._violations:
            raise Violation("; ".join(self._violations[:5]))

    def _note(self, record: Any, context: Context | None) -> None:
        if isinstance(record, TransferSpan):
            self._ends[record.group, record.route, record.outcome] += 1
            if record.transfer_id in self._transfers:
                self._violations.append(f"the transfer ended twice: {record}")
            self._transfers.add(record.transfer_id)
            times = (record.queued_at, record.started_at or record.queued_at, record.ended_at)
            if list(times) != sorted(times):
                self._violations.append(f"times are not in order: {record}")
            return
        if record.began_at > record.ended_at:
            self._violations.append(f"the end is before the begin: {record}")
        if isinstance(record, LeasePhase) and record.phase == "granted":
            if record.began_at < self._held[record.lease_id]:
                self._violations.append(f"grants of one lease overlap: {record}")
            self._held[record.lease_id] = record.ended_at
