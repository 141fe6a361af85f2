"""Link: decides if a step waits for a load, or only the request of the load waits."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

FRONT_SECONDS: Final = 0.0025
"""Longest time that a step waits for loads that are queued before its own."""

_DEFAULT_RATE: Final = 20e9  # bytes per second before the first measurement: PCIe 4
_RATE_SECONDS: Final = 1.0  # interval between two reads of the measured speed


class Moving(Protocol):
    """Transfers of one load."""

    @property
    def is_done(self) -> bool:
        """True if no byte of the load is copied any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Load:
    moving: Moving
    num_blocks: int
    end: float  # expected time of the end


class LoadQueue:
    """Loads in flight from host memory, which are copied one after the other.

    Args:
        block_bytes: bytes per block, summed over all ranks.
        measured_rate: returns the speed of loads in bytes per second; 0.0 before the first load.
        step_wait_seconds: longest expected time that a step waits for a load: see ``Options``.
        clock: returns the time in seconds.

    Attributes:
        step_wait_seconds: as the argument.
    """

    def __init__(
        self,
        block_bytes: int,
        measured_rate: Callable[[], float],
        step_wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_bytes = block_bytes
        self._measured_rate = measured_rate
        self.step_wait_seconds = step_wait_seconds
        self._clock = clock
        self._loads: deque[_Load] = deque()
        self._rate = _DEFAULT_RATE
        self._looked = -_RATE_SECONDS

    def add(self, load: Moving, num_blocks: int) -> None:
        """Add a load that has begun."""
        self._forget()
        begins = max(self._clock(), self._loads[-1].end) if self._loads else self._clock()
        self._loads.append(_Load(load, num_blocks, begins + self._seconds(num_blocks)))

    def seconds_left(self, moving: Moving) -> float:
        """Return the expected time until a load ends, behind those that were added before it."""
        ends = (load.end for load in self._loads if load.moving is moving and not moving.is_done)
        return max(next(ends, 0.0) - self._clock(), 0.0)

    def seconds_of(self, num_blocks: int) -> float:
        """Return the expected time until a load that begins now ends, behind those in flight."""
        self._forget()
        front = max(self._loads[-1].end - self._clock(), 0.0) if self._loads else 0.0
        return front + self._seconds(num_blocks)

    def suits_step(self, num_blocks: int, *, deferred_blocks: int, has_others: bool) -> bool:
        """Return True if the step that computes a request should wait for its load.

        The blocks of a layer are then copied while the model computes the layers before it. If
        other loads are queued before this one, the step would wait for them too, although the
        model could compute other requests.

        Args:
            num_blocks: number of blocks in the load.
            deferred_blocks: number of blocks in earlier loads that have not begun.
            has_others: True if the step computes other requests.
        """
        self._forget()
        front = deferred_blocks
        front += sum(load.num_blocks for load in self._loads if not load.moving.is_done)
        if front and self._seconds(front) > FRONT_SECONDS:
            return False
        return not has_others or self._seconds(front + num_blocks) <= self.step_wait_seconds

    def _forget(self) -> None:
        """Remove the loads that have ended: mostly, they end in the order in which they began."""
        loads = self._loads
        while loads and loads[0].moving.is_done:
            loads.popleft()
        while loads and loads[-1].moving.is_done:
            loads.pop()

    def _seconds(self, num_blocks: int) -> float:
        now = self._clock()
        if now - self._looked >= _RATE_SECONDS:
            self._rate, self._looked = self._measured_rate() or _DEFAULT_RATE, now
        return num_blocks * self._block_bytes / self._rate
