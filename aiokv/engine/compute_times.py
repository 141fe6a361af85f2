"""ComputeTimes: how long the batches of ``engine.computing`` take that compute prompts.

The number of prompt tokens is that of the positions that leases commit. So a prompt that is
computed in several batches has to be committed after each of them.

Batches that wait for onloads of their leases are not measured: their time is that of the onloads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.engine.speed import PrefillSpeed


@dataclass(slots=True, eq=False)
class ComputeTimes:
    """Measures the times of batches or steps, for a :class:`PrefillSpeed`.

    Attributes:
        speed: receives the measurements.
        committed: returns the number of prompt tokens that were committed so far.
        clock: returns the time in seconds.
    """

    speed: PrefillSpeed
    committed: Callable[[], int]
    clock: Callable[[], float] = time.monotonic

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """Note that a batch begins; ``waits`` if a lease of it has onloads in flight."""

    def batch_ends(self, batch_id: int) -> None:
        """Note that the ``with`` block, work and events of a batch have ended. Idempotent."""

    def step_closes(self, step: int) -> None:
        """Note that the open step is closed."""

    def step_finished(self, step: int) -> None:
        """Note that a step and all earlier steps have finished."""


@dataclass(slots=True, eq=False)
class BatchTimes(ComputeTimes):
    """Times of batches, on a device whose work has ended when its batch has ended.

    The tokens that are committed between the begins of two batches are those of the first one. It
    takes the time until the second one begins, without the time in which no batch was in flight.
    """

    _running: set[int] = field(default_factory=set, init=False)
    _began: float = field(default=0.0, init=False)  # time at which the newest batch began
    _ended: float = field(default=0.0, init=False)  # time at which the last batch in flight ended
    _tokens: int = field(default=0, init=False)  # committed tokens when the newest batch began
    _is_measured: bool = field(default=False, init=False)

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """See :class:`ComputeTimes`."""
        now, tokens = self.clock(), self.committed()
        if self._is_measured:
            end = now if self._running else self._ended
            self.speed.note(tokens - self._tokens, end - self._began)
        self._is_measured = not waits
        self._began, self._tokens = now, tokens
        self._running.add(batch_id)

    def batch_ends(self, batch_id: int) -> None:
        """See :class:`ComputeTimes`."""
        if batch_id in self._running:
            self._running.remove(batch_id)
            if not self._running:
                self._ended = self.clock()


@dataclass(slots=True, eq=False)
class StepTimes(ComputeTimes):
    """Times of steps, on a device that computes in a stream, and with ranks.

    A step has the tokens that are committed before it is closed. It takes the time from the begin
    of its first batch, or from the end of the step before if that is later, until the event of the
    step is done.
    """

    _tokens: int = field(default=0, init=False)  # committed tokens when the open step began
    # Time at which the first batch of the open step began, and if one waits for onloads.
    _began: float | None = field(default=None, init=False)
    _waits: bool = field(default=False, init=False)
    # By step: its tokens and its begin.
    _closed: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)
    _finished: float = field(default=0.0, init=False)

    def batch_begins(self, batch_id: int, *, waits: bool) -> None:
        """See :class:`ComputeTimes`."""
        if self._began is None:
            self._began = self.clock()
        self._waits |= waits

    def step_closes(self, step: int) -> None:
        """See :class:`ComputeTimes`."""
        tokens = self.committed()
        if self._began is not None and not self._waits and tokens > self._tokens:
            self._closed[step] = (tokens - self._tokens, self._began)
        self._tokens, self._began, self._waits = tokens, None, False

    def step_finished(self, step: int) -> None:
        """See :class:`ComputeTimes`."""
        now = self.clock()
        ended = [self._closed.pop(number) for number in list(self._closed) if number <= step]
        if ended:
            tokens = sum(tokens for tokens, _ in ended)
            self.speed.note(tokens, now - max(ended[0][1], self._finished))
        self._finished = now
