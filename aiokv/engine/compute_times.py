"""ComputeTimes: how long the batches of ``engine.computing`` take that compute prompts.

The number of prompt tokens is that of the positions that leases commit. So a prompt that is
computed in several batches has to be committed after each of them.

Batches that wait for onloads of their leases are not measured: their time is that of the onloads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.engine.speed import PrefillSpeed


class ComputeTimes:
    """Measures the times of batches or steps, for a :class:`PrefillSpeed`.

    Args:
        speed: receives the measurements.
        committed: returns the number of prompt tokens that were committed so far.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        speed: PrefillSpeed,
        committed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._speed = speed
        self._committed = committed
        self._clock = clock

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """Note that a batch begins; ``waits`` if a lease of it has onloads in flight."""

    def batch_ends(self, batch_id: int) -> None:
        """Note that the ``with`` block, work and events of a batch have ended. Idempotent."""

    def step_closes(self, step: int) -> None:
        """Note that the open step is closed."""

    def step_finished(self, step: int) -> None:
        """Note that a step and all earlier steps have finished."""


class BatchTimes(ComputeTimes):
    """Times of batches, on a device whose work has ended when its batch has ended.

    The tokens that are committed between the begins of two batches are those of the first one. It
    takes the time until the second one begins, without the time in which no batch was in flight.
    """

    def __init__(
        self,
        speed: PrefillSpeed,
        committed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(speed, committed, clock)
        self._running: set[int] = set()
        self._began = 0.0  # time at which the newest batch began
        self._ended = 0.0  # time at which the last batch in flight ended
        self._tokens = 0  # committed tokens when the newest batch began
        self._is_measured = False

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """See :class:`ComputeTimes`."""
        now, tokens = self._clock(), self._committed()
        if self._is_measured:
            end = now if self._running else self._ended
            self._speed.note(tokens - self._tokens, end - self._began)
        self._is_measured = not waits
        self._began, self._tokens = now, tokens
        self._running.add(batch_id)

    def batch_ends(self, batch_id: int) -> None:
        """See :class:`ComputeTimes`."""
        if batch_id in self._running:
            self._running.remove(batch_id)
            if not self._running:
                self._ended = self._clock()


class StepTimes(ComputeTimes):
    """Times of steps, on a device that computes in a stream, and with ranks.

    A step has the tokens that are committed before it is closed. It takes the time from the begin
    of its first batch, or from the end of the step before if that is later, until the event of the
    step is done.
    """

    def __init__(
        self,
        speed: PrefillSpeed,
        committed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(speed, committed, clock)
        self._tokens = 0  # committed tokens when the open step began
        self._began: float | None = None  # time at which the first batch of the open step began
        self._waits = False  # whether a batch of the open step waits for onloads
        self._closed: dict[int, tuple[int, float]] = {}  # by step: its tokens and its begin
        self._finished = 0.0

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """See :class:`ComputeTimes`."""
        if self._began is None:
            self._began = self._clock()
        self._waits |= waits

    def step_closes(self, step: int) -> None:
        """See :class:`ComputeTimes`."""
        tokens = self._committed()
        if self._began is not None and not self._waits and tokens > self._tokens:
            self._closed[step] = (tokens - self._tokens, self._began)
        self._tokens, self._began, self._waits = tokens, None, False

    def step_finished(self, step: int) -> None:
        """See :class:`ComputeTimes`."""
        now = self._clock()
        ended = [self._closed.pop(number) for number in list(self._closed) if number <= step]
        if ended:
            tokens = sum(tokens for tokens, _ in ended)
            self._speed.note(tokens, now - max(ended[0][1], self._finished))
        self._finished = now
