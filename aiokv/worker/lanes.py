"""One route of a controller: plans that wait, plans that move, and their bandwidth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from aiokv.base.groups import RETENTIONS
from aiokv.base.plan import (
    CLONE,
    FETCH,
    OFFLOAD,
    ONLOAD,
    RECEIVE,
    SAVE,
    SEND,
    STATE_CLONE,
)
from aiokv.base.statistics import RouteStatistics, WorkerStatistics
from aiokv.worker.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.base.groups import Retention
    from aiokv.base.plan import GroupRoute, Outcome, Route
    from aiokv.worker.transfers import Transfer

BANDWIDTH_WEIGHT: Final = 0.2  # of the newest transfer in the moving average
LEARN_BYTES: Final = 1 << 20  # smaller transfers are mostly latency: no measure of bandwidth


_IDLE_LANE: Final = RouteStatistics(
    queued=0,
    submitted=0,
    done=0,
    failed=0,
    cancelled=0,
    moved_bytes=0,
    busy_seconds=0.0,
    queue_seconds=0.0,
    bytes_per_second=0.0,
)


_PREFIXES: Final[dict[Retention, str]] = {"all": "", "last": "state_", "window": "window_"}


def _name(retention: Retention, route: Route) -> str:
    """Return the name in statistics of a route of the groups of a retention."""
    is_state = (retention, route) == STATE_CLONE
    return "state" if is_state else _PREFIXES[retention] + route.name


ROUTE_NAMES: Final = tuple(
    _name(retention, route)
    for retention in RETENTIONS
    for route in (ONLOAD, OFFLOAD, CLONE, FETCH, SAVE, RECEIVE, SEND)
    if route != CLONE or (retention, route) == STATE_CLONE
)
"""Names of the routes in :class:`WorkerStatistics`."""


def worker_statistics(
    held: int, routes: Mapping[GroupRoute, RouteStatistics], corrupt: int = 0
) -> WorkerStatistics:
    """Return the statistics of a worker; a route that it lacks has moved nothing."""
    by_name: dict[str, RouteStatistics] = dict.fromkeys(ROUTE_NAMES, _IDLE_LANE)
    for route, statistics in routes.items():
        by_name[_name(*route)] = statistics
    return WorkerStatistics(held=held, corrupt=corrupt, routes=by_name)


IDLE: Final = worker_statistics(0, {})


class Lane:
    """Queue, submitted transfers and counts of one route."""

    def __init__(self, route: GroupRoute) -> None:
        self.route = route
        self.queue = TransferQueue()
        self.submitted: dict[int, Transfer] = {}  # by transfer id
        self.outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self.moved_bytes = 0
        self.busy_seconds = 0.0
        self.queue_seconds = 0.0
        self.bytes_per_second = 0.0
        self.last_end = 0.0

    def note_end(self, transfer: Transfer, finished_seconds: float) -> None:
        """Learn the bandwidth from a transfer that moved all its bytes.

        Args:
            transfer: has ended.
            finished_seconds: by the device's clock where it has one. The time until the loop
                noticed the end would make the next transfer seem slower, and the poller sleep
                longer, which would add to the next measurement.
        """
        seconds = finished_seconds - max(transfer.started_at, self.last_end)
        self.last_end = finished_seconds
        self.moved_bytes += transfer.num_bytes
        self.busy_seconds += max(seconds, 0.0)
        if seconds <= 0 or transfer.num_bytes < LEARN_BYTES:
            return
        newest = transfer.num_bytes / seconds
        weight = BANDWIDTH_WEIGHT if self.bytes_per_second else 1.0
        self.bytes_per_second += weight * (newest - self.bytes_per_second)

    def expected_seconds(self, transfer: Transfer) -> float | None:
        """Return the expected duration of a transfer, or None while that is unknown."""
        if not self.bytes_per_second or transfer.num_bytes < LEARN_BYTES:
            return None
        return transfer.num_bytes / self.bytes_per_second

    def statistics(self) -> RouteStatistics:
        return RouteStatistics(
            queued=len(self.queue),
            submitted=len(self.submitted),
            done=self.outcomes["done"],
            failed=self.outcomes["failed"],
            cancelled=self.outcomes["cancelled"],
            moved_bytes=self.moved_bytes,
            busy_seconds=self.busy_seconds,
            queue_seconds=self.queue_seconds,
            bytes_per_second=self.bytes_per_second,
        )


class RunningCounts:
    """Counts of a route on which transfers start at once, for :class:`RouteStatistics`.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self._moved_bytes = 0
        self._busy_seconds = 0.0
        self._running: set[int] = set()
        self._busy_since = 0.0

    def begin(self, transfer_id: int) -> None:
        """Count a transfer in flight. Idempotent."""
        if not self._running:
            self._busy_since = self._clock()
        self._running.add(transfer_id)

    def end(self, transfer_id: int, outcome: Outcome, moved_bytes: int) -> None:
        """Count the end of a transfer, and the bytes that it has moved."""
        self._running.discard(transfer_id)
        self._outcomes[outcome] += 1
        self._moved_bytes += moved_bytes
        if not self._running:
            self._busy_seconds += self._clock() - self._busy_since

    def statistics(self) -> RouteStatistics:
        """Return the counts; nothing is queued."""
        seconds = self._busy_seconds
        return RouteStatistics(
            queued=0,
            submitted=len(self._running),
            done=self._outcomes["done"],
            failed=self._outcomes["failed"],
            cancelled=self._outcomes["cancelled"],
            moved_bytes=self._moved_bytes,
            busy_seconds=seconds,
            queue_seconds=0.0,
            bytes_per_second=self._moved_bytes / seconds if seconds else 0.0,
        )
