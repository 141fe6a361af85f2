"""StepClock: numbers the steps of the model, and knows which steps have finished."""

from __future__ import annotations

from collections import deque


class StepClock:
    """Numbers of the steps, which are closed and finish in ascending order.

    Attributes:
        next: number of the step that is closed next.
        open: number of the open step; 0 on a device that computes before the call returns, where
            committed blocks are computed.
        tracked: False on such a device.
    """

    __slots__ = ("_closed", "_finished", "next", "open", "tracked")

    def __init__(self) -> None:
        self.next = 1
        self.open = 0
        self.tracked = False
        self._closed: deque[int] = deque()  # not finished, oldest first
        self._finished = 0

    def track(self, tracked: bool) -> None:
        """Say whether the device may compute after the call returns."""
        self.tracked = tracked
        self.open = self.next if tracked else 0

    @property
    def last_unfinished(self) -> int:
        """Newest step that is closed and has not finished; 0 for none."""
        return self._closed[-1] if self._closed else 0

    def close(self) -> int:
        """Close the open step and return its number."""
        step = self.next
        if step > self._finished:
            self._closed.append(step)
        self.next = step + 1
        if self.tracked:
            self.open = self.next
        return step

    def finish(self, step: int) -> None:
        """Note that ``step`` and all steps before it have finished. Idempotent.

        A worker may report the end of a step before ``close`` is called.
        """
        self._finished = max(self._finished, step)
        while self._closed and self._closed[0] <= step:
            self._closed.popleft()
