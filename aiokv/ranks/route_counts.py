"""Counts of one direction over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.worker.lanes import LaneStatistics

if TYPE_CHECKING:
    from aiokv.plan import Outcome


class RouteCounts:
    """A transfer is under way from its submission to the end on the last rank."""

    def __init__(self) -> None:
        self._outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self._under_way = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._moved_bytes = 0

    def begin(self, now: float) -> None:
        if not self._under_way:
            self._busy_since = now
        self._under_way += 1

    def end(self, outcome: Outcome, num_bytes: int, now: float) -> None:
        """``num_bytes`` over all ranks."""
        self._outcomes[outcome] += 1
        self._under_way -= 1
        if outcome == "done":
            self._moved_bytes += num_bytes
        if not self._under_way:
            self._busy_seconds += now - self._busy_since

    def statistics(self) -> LaneStatistics:
        """``queued`` is 0: what the ranks do with what they have is theirs to tell."""
        return LaneStatistics(
            queued=0,
            submitted=self._under_way,
            done=self._outcomes["done"],
            failed=self._outcomes["failed"],
            cancelled=self._outcomes["cancelled"],
            moved_bytes=self._moved_bytes,
            busy_seconds=self._busy_seconds,
            bytes_per_second=self._moved_bytes / self._busy_seconds if self._busy_seconds else 0.0,
        )
