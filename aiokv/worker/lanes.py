"""One direction of a controller: what waits, what moves, and how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.worker.transfers import TransferQueue

if TYPE_CHECKING:
    from aiokv.plan import Direction, Outcome
    from aiokv.worker.transfers import Transfer

BANDWIDTH_WEIGHT: Final = 0.2  # of the newest transfer in the moving average
LEARN_BYTES: Final = 1 << 20  # smaller transfers are mostly latency and say nothing of bandwidth


class LaneStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One direction.

    Attributes:
        busy_seconds: at least one transfer that moved its bytes was submitted and had not ended.
        bytes_per_second: moving average over transfers of 1 MiB and more; 0.0 before the first.
    """

    queued: int
    submitted: int
    done: int
    failed: int
    cancelled: int
    moved_bytes: int
    busy_seconds: float
    bytes_per_second: float


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """``held``: transfers whose step is still open."""

    held: int
    onload: LaneStatistics
    offload: LaneStatistics
    state: LaneStatistics


_IDLE_LANE: Final = LaneStatistics(
    queued=0,
    submitted=0,
    done=0,
    failed=0,
    cancelled=0,
    moved_bytes=0,
    busy_seconds=0.0,
    bytes_per_second=0.0,
)
IDLE: Final = WorkerStatistics(held=0, onload=_IDLE_LANE, offload=_IDLE_LANE, state=_IDLE_LANE)


class Lane:
    """Everything of one direction."""

    def __init__(self, direction: Direction) -> None:
        self.direction: Direction = direction
        self.queue = TransferQueue()
        self.submitted: dict[int, Transfer] = {}  # by transfer id
        self.outcomes: dict[Outcome, int] = {"done": 0, "failed": 0, "cancelled": 0}
        self.moved_bytes = 0
        self.busy_seconds = 0.0
        self.bytes_per_second = 0.0
        self.last_end = 0.0

    def note_end(self, transfer: Transfer, finished_seconds: float) -> None:
        """Learn the bandwidth from a transfer that moved all its bytes.

        Args:
            finished_seconds: by the device's clock where it has one. Time until the loop noticed
                would make the next transfer seem slower, the poller sleep longer, and so on.
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
        """Return how long a transfer will move, or None while that is unknown."""
        if not self.bytes_per_second or transfer.num_bytes < LEARN_BYTES:
            return None
        return transfer.num_bytes / self.bytes_per_second

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(
            queued=len(self.queue),
            submitted=len(self.submitted),
            done=self.outcomes["done"],
            failed=self.outcomes["failed"],
            cancelled=self.outcomes["cancelled"],
            moved_bytes=self.moved_bytes,
            busy_seconds=self.busy_seconds,
            bytes_per_second=self.bytes_per_second,
        )
