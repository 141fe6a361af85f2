"""Cost: measured latency and bandwidth of one operation of a store."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiokv.base.rates import bounded_mean

WINDOW: Final = 16  # newest measurements from which a value is estimated
HALF_LIFE_SECONDS: Final = 5.0  # age at which a measurement has half its weight
# A batch with fewer bytes, and not more blocks, measures the latency; others measure the bandwidth.
LATENCY_BYTES: Final = 256 << 10
LATENCY_BLOCKS: Final = 32
# A batch is late after this multiple of its expected duration, plus this time. Both are so small
# that a store is late before the requests stop waiting for it: see ``Comparison.patience``.
LATE_FACTOR: Final = 1.5
LATE_SECONDS: Final = 0.01


class _Rate:
    """Seconds per unit, from the newest measurements.

    A single extreme measurement has hardly an effect, and old ones fade: see ``bounded_mean`` and
    ``HALF_LIFE_SECONDS``. An estimate holds until the next measurement.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        # None if a measurement was added since the last estimate.
        self._estimate: float | None = 0.0

    def note(self, units: float, seconds: float, now: float) -> None:
        """Note that ``units`` have taken ``seconds``."""
        if units > 0 and seconds > 0:
            self._measured.append((units, seconds, now))
            self._estimate = None

    @property
    def seconds(self) -> float:
        """Seconds per unit; 0.0 before the first measurement."""
        if self._estimate is None:
            newest = self._measured[-1][2]
            self._estimate = bounded_mean(
                (seconds / units, units * 0.5 ** ((newest - time) / HALF_LIFE_SECONDS))
                for units, seconds, time in self._measured
            )
        return self._estimate


class Cost:
    """Expected duration of the batches of one operation, under the present load.

    Large batches in flight at the same time share the time of the store equally, so the bandwidth
    is that of all batches together.

    Each batch also bounds the value that it does not measure: neither the latency nor the time to
    move its bytes is longer than the batch. So quick batches of any size correct both.
    """

    def __init__(self) -> None:
        self._latency = _Rate()  # per batch
        self._transfer = _Rate()  # per byte
        self._small: dict[StoreBatch, None] = {}  # in flight, in the order of their begins
        self._large: dict[StoreBatch, None] = {}
        self._share = 0.0  # seconds of the store for each large batch in flight so far
        self._shared_until = 0.0
        # Time at which the newest large operation ended, or the first batch began.
        self._progress_at = 0.0

    @property
    def latency_seconds(self) -> float:
        """Duration of a small batch; 0.0 before the first."""
        return self._latency.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of large batches; 0.0 before the first measurement."""
        return 1.0 / self._transfer.seconds if self._transfer.seconds else 0.0

    def note_latency(self, seconds: float, now: float) -> None:
        """Note that a small batch has taken ``seconds``."""
        self._latency.note(1, seconds, now)

    def begin(self, num_bytes: int, now: float, num_blocks: int = 1) -> StoreBatch:
        """Return a batch that begins now. The caller must call its ``end``.

        Args:
            num_bytes: payload of all blocks.
            now: time of the loop.
            num_blocks: number of blocks.
        """
        is_large = num_bytes >= LATENCY_BYTES or num_blocks > LATENCY_BLOCKS
        batch = StoreBatch(self, num_bytes, now, is_large=is_large)
        if is_large:
            if not self._large:
                self._progress_at = now
            batch.share = self._shared(now)
            self._large[batch] = None
        else:
            self._small[batch] = None
        return batch

    def note_large(self, batch: StoreBatch, num_bytes: int, now: float) -> None:
        """Record the duration of an operation of a large batch, from ``batch.began`` to ``now``."""
        seconds = now - batch.began
        share = self._shared(now) - batch.share
        self._transfer.note(num_bytes, max(share - self._latency.seconds, share / 2), now)
        if seconds < self._latency.seconds:
            self._latency.note(1, seconds, now)
        self.advance(batch, now)

    def advance(self, batch: StoreBatch, now: float) -> None:
        """Note that the next operation of a large batch begins."""
        batch.began, batch.share = now, self._shared(now)
        self._progress_at = now

    def note_small(self, batch: StoreBatch, moved_bytes: int, now: float) -> None:
        """Record the duration of a small batch, from ``batch.began`` to ``now``."""
        seconds = now - batch.began
        self._latency.note(1, seconds, now)
        if seconds < moved_bytes * self._transfer.seconds:
            self._transfer.note(moved_bytes, seconds, now)

    def remove(self, batch: StoreBatch) -> None:
        """Note that a batch is no longer in flight."""
        self._small.pop(batch, None)
        self._large.pop(batch, None)

    def _shared(self, now: float) -> float:
        """Return the seconds of the store that each large batch in flight has had until now."""
        if self._large:
            self._share += (now - self._shared_until) / len(self._large)
        self._shared_until = now
        return self._share

    def parts(self, now: float) -> tuple[float, float]:
        """Return the expected ``(seconds per batch, seconds per byte)``.

        Both are 0 before the first measurement. A batch in flight that takes longer than expected
        counts before its end.
        """
        latency, per_byte = self._latency.seconds, self._transfer.seconds
        if num_bytes := sum(batch.bytes_left for batch in self._large):
            per_byte = max(per_byte, (now - self._progress_at - latency) / num_bytes)
        if self._small:
            latency = max(latency, now - next(iter(self._small)).began)
        return latency, per_byte

    def is_late(self, now: float) -> bool:
        """Return True if a batch in flight takes much longer than expected."""
        per_byte = self._transfer.seconds * len(self._large)
        return any(
            now - batch.began
            > LATE_FACTOR * (self._latency.seconds + batch.bytes_left * per_byte) + LATE_SECONDS
            for batch in (*self._small, *self._large)
        )


class StoreBatch:
    """One load or save, whose bytes are moved by one or more operations, one after the other.

    Attributes:
        bytes_left: bytes of operations that have not ended.
        began: begin of the operation in flight.
        share: for a large batch, the value of ``Cost`` at ``began``.
    """

    def __init__(self, cost: Cost, num_bytes: int, now: float, *, is_large: bool) -> None:
        self._cost = cost
        self._is_large = is_large
        self.bytes_left = num_bytes
        self.began = now
        self.share = 0.0

    def skip(self, num_bytes: int, now: float) -> None:
        """Note the end of an operation of ``num_bytes`` that measures nothing."""
        self.bytes_left -= num_bytes
        if self._is_large:
            self._cost.advance(self, now)

    def note(self, num_bytes: int, moved_bytes: int, now: float) -> None:
        """Note the end of an operation of ``num_bytes`` that has moved ``moved_bytes``; 0 for one
        that has exceeded its deadline."""
        self.bytes_left -= num_bytes
        if self._is_large:
            self._cost.note_large(self, moved_bytes or num_bytes, now)
        else:
            self._cost.note_small(self, moved_bytes, now)

    def end(self) -> None:
        """Note that no further operation follows."""
        self._cost.remove(self)
