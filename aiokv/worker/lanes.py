"""One route of a controller: plans that wait, plans that move, and their bandwidth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base.plan import STATE_CLONE
from aiokv.worker.transfers import TransferQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.base.groups import Retention
    from aiokv.base.plan import GroupRoute, Outcome, Route

BANDWIDTH_WEIGHT: Final = 0.2  # of the newest transfer in the moving average
LEARN_BYTES: Final = 1 << 20  # smaller transfers are mostly latency: no measure of bandwidth


class LaneStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one route.

    Attributes:
        queued: transfers that wait for the device.
        submitted: transfers that the device has.
        done: transfers that have copied all their blocks.
        failed: transfers that have not, because of an error.
        cancelled: transfers that never reached the device.
        moved_bytes: of the transfers that are done.
        busy_seconds: time during which at least one transfer that moved its bytes was submitted.
        queue_seconds: time from the submission of a plan until the device had it, over the
            transfers that are done or failed; includes the wait for its step. 0.0 on routes of
            stores and peers, which have no queue. With ranks: the mean over the ranks, as of their
            last answers to heartbeats.
        bytes_per_second: moving average over transfers of 1 MiB and more; 0.0 before the first.
    """

    queued: int
    submitted: int
    done: int
    failed: int
    cancelled: int
    moved_bytes: int
    busy_seconds: float
    queue_seconds: float
    bytes_per_second: float


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a worker, per route.

    Attributes:
        held: transfers whose step is still open.
        corrupt: onloads whose bytes did not have the checksums of the committed blocks.
        onload: host to device.
        offload: device to host.
        state: slots of recurrent state, within the device.
        state_onload: slots of recurrent state, host to device.
        state_offload: slots of recurrent state, device to host.
        fetch: stores to host; ``done`` when all blocks of the plan arrived.
        save: host to stores; ``moved_bytes`` are those of the blocks that a store has taken.
        receive: peers to device; ``done`` when all blocks of the plan arrived.
        send: device to peers; ``done`` when the receiver has acknowledged all blocks of the plan.
        state_fetch: slots of recurrent state, stores to host.
        state_save: slots of recurrent state, host to stores.
        window_onload: blocks of sliding windows, host to device; likewise the other routes of
            windows.
        state_receive: slots of recurrent state, peers to device.
        state_send: slots of recurrent state, device to peers.
    """

    held: int
    corrupt: int
    onload: LaneStatistics
    offload: LaneStatistics
    state: LaneStatistics
    fetch: LaneStatistics
    save: LaneStatistics
    state_onload: LaneStatistics
    state_offload: LaneStatistics
    state_fetch: LaneStatistics
    state_save: LaneStatistics
    window_onload: LaneStatistics
    window_offload: LaneStatistics
    receive: LaneStatistics
    send: LaneStatistics
    window_fetch: LaneStatistics
    window_save: LaneStatistics
    state_receive: LaneStatistics
    state_send: LaneStatistics
    window_receive: LaneStatistics
    window_send: LaneStatistics


ROUTE_NAMES: Final = tuple(
    name for name in WorkerStatistics.__struct_fields__ if name not in ("held", "corrupt")
)
"""Fields of :class:`WorkerStatistics` that are a route."""

_IDLE_LANE: Final = LaneStatistics(
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
    """Return the field of a route of the groups of a retention."""
    is_state = (retention, route) == STATE_CLONE
    return "state" if is_state else _PREFIXES[retention] + route.name


def worker_statistics(
    held: int, routes: Mapping[GroupRoute, LaneStatistics], corrupt: int = 0
) -> WorkerStatistics:
    """Return the statistics of a worker; a route that it lacks has moved nothing."""
    by_name: dict[str, LaneStatistics] = {
        _name(*route): statistics for route, statistics in routes.items()
    }
    return WorkerStatistics(
        held=held,
        corrupt=corrupt,
        **{name: by_name.get(name, _IDLE_LANE) for name in ROUTE_NAMES},
    )


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
            outcome: of the transfer.
            moved_bytes: that it has moved.
            queue_seconds: from its submission until it began; not counted on these routes.
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
        """Mean over the time in which a transfer was in flight; 0.0 before the first end."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds else 0.0

    def statistics(self) -> LaneStatistics:
        """Return the counts. Any thread."""
        return LaneStatistics(
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
            num_bytes: of the transfer.
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
