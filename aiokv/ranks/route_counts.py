"""Counts of one route over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.worker.lanes import LaneStatistics

if TYPE_CHECKING:
    from aiokv.plan import Outcome


class RouteCounts:
    """Counts of transfers; one is in flight from its submission to its end on the last rank."""

    def __init__(self) -> None:
        self._outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._moved_bytes = 0

    def begin(self, now: float) -> None:
        """Count a submitted transfer."""
        if not self._in_flight:
            self._busy_since = now
        self._in_flight += 1

    def end(self, outcome: Outcome, num_bytes: int, now: float) -> None:
        """Count the end of a transfer, which has moved ``num_bytes`` over all ranks."""
        self._outcomes[outcome] += 1
        self._in_flight -= 1
        if outcome == "done":
            self._moved_bytes += num_bytes
        if not self._in_flight:
            self._busy_seconds += now - self._busy_since

    def statistics(self) -> LaneStatistics:
        """Return the counts; nothing is queued: only the ranks know which transfers wait."""
        return LaneStatistics(
            queued=0,
            submitted=self._in_flight,
            done=self._outcomes["done"],
            failed=self._outcomes["failed"],
            cancelled=self._outcomes["cancelled"],
            moved_bytes=self._moved_bytes,
            busy_seconds=self._busy_seconds,
            queue_seconds=0.0,
            bytes_per_second=self._moved_bytes / self._busy_seconds if self._busy_seconds else 0.0,
        )
