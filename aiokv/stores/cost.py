"""Cost: moving averages of the latency and the bandwidth of a store."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.2  # of the newest measurement
LATENCY_BYTES: Final = 256 << 10  # smaller batches measure the latency, larger ones the bandwidth
HALF_LIFE_SECONDS: Final = 60.0  # of an estimate that no new measurement confirms


class Cost:
    """Duration of the batches of one operation.

    The estimate for a store that was not used for a while decreases, so that the store is tried
    again after it was too slow. It is 0 before the first measurement.

    Attributes:
        latency_seconds: average duration of a small batch; 0.0 before the first.
        bytes_per_second: average bandwidth of a large batch; 0.0 before the first.
    """

    def __init__(self) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0
        self._measured_at = 0.0

    def note(self, num_bytes: int, seconds: float, now: float) -> None:
        """Learn from a batch that took ``seconds``."""
        if seconds <= 0.0:
            return
        self._measured_at = now
        if num_bytes < LATENCY_BYTES:
            weight = WEIGHT if self.latency_seconds else 1.0
            self.latency_seconds += weight * (seconds - self.latency_seconds)
        else:
            newest = num_bytes / max(seconds - self.latency_seconds, seconds / 2)
            weight = WEIGHT if self.bytes_per_second else 1.0
            self.bytes_per_second += weight * (newest - self.bytes_per_second)

    def parts(self, now: float) -> tuple[float, float]:
        """Return the expected ``(seconds per batch, seconds per byte)``."""
        per_byte = 1 / self.bytes_per_second if self.bytes_per_second else 0.0
        trust = 0.5 ** (max(now - self._measured_at, 0.0) / HALF_LIFE_SECONDS)
        return trust * self.latency_seconds, trust * per_byte
