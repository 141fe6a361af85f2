"""Cost: measured latency and bandwidth of one operation of a store."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.2  # of the newest measurement
LATENCY_BYTES: Final = 256 << 10  # smaller batches measure the latency, larger ones the bandwidth


class Cost:
    """Expected duration of the batches of one operation, under the present load.

    The bandwidth is that of all batches together: the bytes that were moved, divided by the time in
    which at least one batch was in flight. An estimate holds until the next measurement.

    Attributes:
        latency_seconds: average duration of a small batch; 0.0 before the first.
    """

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        # Sums over the large batches; each measurement lowers the weight of the earlier ones.
        self._moved_bytes = 0.0
        self._busy_seconds = 0.0
        self._batches = 0  # large batches in flight
        self._bytes = 0  # bytes of these batches whose operations have not ended
        self._counted_until = 0.0  # end of the busy time that is in the sum

    @property
    def bytes_per_second(self) -> float:
        """Average bandwidth of large batches; 0.0 before the first measurement."""
        return self._moved_bytes / self._busy_seconds if self._busy_seconds else 0.0

    def note_latency(self, seconds: float) -> None:
        """Update the latency with a small batch that took ``seconds``."""
        if seconds > 0.0:
            weight = WEIGHT if self.latency_seconds else 1.0
            self.latency_seconds += weight * (seconds - self.latency_seconds)

    def begin(self, num_bytes: int, now: float) -> Batch:
        """Note that a batch has begun."""
        return Batch(self, num_bytes, now)

    def add(self, num_bytes: int, now: float) -> None:
        """Note that a large batch has begun."""
        if not self._batches:
            self._counted_until = now
        self._batches += 1
        self._bytes += num_bytes

    def note_moved(self, num_bytes: int, moved_bytes: int, now: float) -> None:
        """Note the end of an operation of ``num_bytes`` that is part of a large batch."""
        self._bytes -= num_bytes
        seconds = now - self._counted_until
        self._counted_until = now
        self._moved_bytes = (1 - WEIGHT) * self._moved_bytes + moved_bytes
        seconds = max(seconds - self.latency_seconds, seconds / 2)
        self._busy_seconds = (1 - WEIGHT) * self._busy_seconds + seconds

    def remove(self, num_bytes: int) -> None:
        """Note the end of a large batch, of which ``num_bytes`` were in no ended operation."""
        self._batches -= 1
        self._bytes -= num_bytes

    def parts(self, now: float) -> tuple[float, float]:
        """Return the expected ``(seconds per batch, seconds per byte)``.

        Both are 0 before the first measurement. A batch in flight that takes longer than expected
        counts before its end.
        """
        per_byte = self._busy_seconds / max(self._moved_bytes, 1.0)
        if self._bytes:
            late = now - self._counted_until - self.latency_seconds
            per_byte = max(per_byte, late / self._bytes)
        return self.latency_seconds, per_byte


class Batch:
    """One load or save, whose bytes are moved by one or more operations.

    Args:
        cost: is updated by the batch.
        num_bytes: payload of all blocks.
        now: time of the loop.
    """

    def __init__(self, cost: Cost, num_bytes: int, now: float) -> None:
        self._cost = cost
        self._began = now
        self._left = num_bytes
        self._is_large = num_bytes >= LATENCY_BYTES
        if self._is_large:
            cost.add(num_bytes, now)

    def note(self, num_bytes: int, moved_bytes: int, now: float) -> None:
        """Note the end of an operation of ``num_bytes`` that has moved ``moved_bytes``."""
        self._left -= num_bytes
        if self._is_large:
            self._cost.note_moved(num_bytes, moved_bytes, now)
        elif moved_bytes:
            self._cost.note_latency(now - self._began)

    def end(self) -> None:
        """Note that no further operation follows."""
        if self._is_large:
            self._cost.remove(self._left)
