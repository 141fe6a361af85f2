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


class RouteCounts:
    """Counts of a route on which transfers start at once.

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
    """Queue, submitted transfers and counts of one route of a device.

    Attributes:
        queue: transfers that wait for the device.
        submitted: number of transfers that the device has; the owner counts them.
    """

    def __init__(self, route: GroupRoute) -> None:
        super().__init__()
        self.route = route
        self.queue = TransferQueue()
        self._bandwidth = 0.0  # moving average
        self._last_end = 0.0

    @property
    def queued(self) -> int:
        """Transfers that wait for the device; those that wait for a step do not count."""
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
