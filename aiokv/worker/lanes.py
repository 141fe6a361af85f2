"""Plans of a worker by group and route: waiting plans, moving plans, and their bandwidth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aiokv.base.groups import ATTENTION, whole_group
from aiokv.base.statistics import GroupTransferStatistics, RouteStatistics, WorkerStatistics
from aiokv.worker.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.base.plan import Outcome, Route, TransferPlan
    from aiokv.base.statistics import BlockSizes

BANDWIDTH_WEIGHT: Final = 0.2  # weight of the newest transfer in the moving average
LEARN_BYTES: Final = 1 << 20  # smaller transfers measure latency rather than bandwidth


class RouteCounts:
    """Counts of a group and route whose transfers start at once.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.submitted = 0  # transfers in flight
        self.outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self.moved_bytes = 0
        self.busy_seconds = 0.0
        self.queue_seconds = 0.0
        self._busy_since = 0.0

    def begin(self) -> None:
        """Count a transfer that was submitted."""
        if not self.submitted:
            self._busy_since = self._clock()
        self.submitted += 1

    def end(self, outcome: Outcome, moved_bytes: int, queue_seconds: float) -> None:
        """Count the end of a transfer.

        Args:
            outcome: outcome of the transfer.
            moved_bytes: number of bytes that it has moved.
            queue_seconds: time from its submission until it began; not counted on these routes.
        """
        self.submitted -= 1
        self.outcomes[outcome] += 1
        self.moved_bytes += moved_bytes
        if not self.submitted:
            self.busy_seconds += self._clock() - self._busy_since

    @property
    def queued(self) -> int:
        """Transfers that wait for the device."""
        return 0

    @property
    def bytes_per_second(self) -> float:
        """Mean bandwidth while a transfer was in flight; 0.0 before the first end."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds else 0.0

    def statistics(self) -> RouteStatistics:
        """Return the counts. Any thread."""
        return RouteStatistics(
            queued=self.queued,
            submitted=self.submitted,
            done=self.outcomes["done"],
            failed=self.outcomes["failed"],
            cancelled=self.outcomes["cancelled"],
            moved_bytes=self.moved_bytes,
            busy_seconds=self.busy_seconds,
            queue_seconds=self.queue_seconds,
            bytes_per_second=self.bytes_per_second,
        )


class Lane(RouteCounts):
    """Queue, submitted transfers and counts of one group and route of a device.

    Attributes:
        queue: transfers that wait for the device.
        submitted: number of transfers that the device has; the owner counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = TransferQueue()
        self._bandwidth = 0.0  # moving average
        self._last_end = 0.0

    @property
    def queued(self) -> int:
        """Number of transfers that wait for the device, without those that wait for a step."""
        return len(self.queue)

    @property
    def bytes_per_second(self) -> float:
        """Moving average over large transfers; 0.0 before the first."""
        return self._bandwidth

    def begin(self) -> None:
        """Do nothing: a transfer counts when the device has it."""

    def end(self, outcome: Outcome, moved_bytes: int, queue_seconds: float) -> None:
        """Count the end of a transfer; ``note_moved`` has counted its bytes."""
        self.outcomes[outcome] += 1
        if outcome != "cancelled":
            self.queue_seconds += queue_seconds

    def note_moved(self, num_bytes: int, started: float, finished: float) -> None:
        """Learn the bandwidth from a transfer that moved all its bytes.

        Args:
            num_bytes: size of the transfer.
            started: time of its submission to the device, in seconds.
            finished: time of its end, by the device's clock where it has one. The time until the
                loop noticed the end would make the next transfer seem slower, and the poller sleep
                longer, which would add to the next measurement.
        """
        seconds = finished - max(started, self._last_end)
        self._last_end = finished
        self.moved_bytes += num_bytes
        self.busy_seconds += max(seconds, 0.0)
        if seconds <= 0 or num_bytes < LEARN_BYTES:
            return
        newest = num_bytes / seconds
        weight = BANDWIDTH_WEIGHT if self._bandwidth else 1.0
        self._bandwidth += weight * (newest - self._bandwidth)

    def expected_seconds(self, num_bytes: int) -> float | None:
        """Return the expected duration of a transfer, or None while that is unknown."""
        if not self._bandwidth or num_bytes < LEARN_BYTES:
            return None
        return num_bytes / self._bandwidth


C = TypeVar("C", bound=RouteCounts)


class RouteTable(Generic[C]):
    """Counts of an executor by group and route, each made for its first plan.

    Args:
        new: returns new counts.
    """

    def __init__(self, new: Callable[[], C]) -> None:
        self._new = new
        self._counts: dict[tuple[str, Route], C] = {}

    def of(self, plan: TransferPlan) -> C:
        """Return the counts of a plan; the ranges of layers of a group count together."""
        key = whole_group(plan.group), plan.route
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = self._new()
        return counts

    def values(self) -> list[C]:
        """Return all counts."""
        return list(self._counts.values())

    def items(self) -> list[tuple[tuple[str, Route], C]]:
        """Return all counts with their groups and routes. Any thread."""
        return list(self._counts.items())


def worker_statistics(
    groups: Iterable[str],
    tables: Iterable[RouteTable[Any]],
    *,
    held: int,
    corrupt: int = 0,
    block_sizes: dict[str, BlockSizes] | None = None,
) -> WorkerStatistics:
    """Return the statistics of a worker. Any thread.

    Args:
        groups: groups of the worker, besides ``"attention"``.
        tables: counts of its executors; of two with the same group and route, the later ones count.
        held: transfers that wait for their step.
        corrupt: onloads that moved wrong bytes.
        block_sizes: bytes per block, by group.
    """
    routes: dict[str, dict[str, RouteStatistics]] = {ATTENTION: {}, **{name: {} for name in groups}}
    for table in tables:
        for (group, route), counts in table.items():
            routes.setdefault(group, {})[route.name] = counts.statistics()
    return WorkerStatistics(
        held=held,
        corrupt=corrupt,
        groups={group: GroupTransferStatistics(**found) for group, found in routes.items()},
        block_sizes=block_sizes or {},
    )


IDLE: Final = worker_statistics((), (), held=0)
