"""Watched events, and the times at which they are queried."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from aiokv.worker.device.base import Event

    Callback = Callable[[BaseException | None], None]

POLL_BUDGET_SECONDS: Final = 200e-6  # longer polling costs more CPU time than it saves
MIN_BACKOFF_SECONDS: Final = 50e-6
MAX_BACKOFF_SECONDS: Final = 1e-3
BACKOFF_SHARE: Final = 0.125  # share of the overdue time to sleep
MAX_SLEEP_SECONDS: Final = 2e-3  # limits the cost of a wrong expectation to 500 queries per second


class Watch:
    """A watched event.

    Attributes:
        callback: None when it has been called, or was cancelled.
    """

    __slots__ = ("_on_cancel", "callback", "event", "key", "work_seconds")

    def __init__(
        self,
        event: Event,
        key: Hashable,
        callback: Callback,
        work_seconds: float | None,
        on_cancel: Callable[[Watch], None],
    ) -> None:
        self._on_cancel = on_cancel
        self.event = event
        self.key = key
        self.callback: Callback | None = callback
        self.work_seconds = work_seconds

    def cancel(self) -> None:
        """Detach the callback; the event itself is not cancelled. Idempotent."""
        if self.callback is not None:
            self.callback = None
            self._on_cancel(self)


class WatchedStream:
    """Events that finish in order, and the next query of the oldest."""

    __slots__ = ("asked_at", "due", "ends_at", "key", "next_query", "queue", "slept")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.queue: deque[Watch] = deque()
        self.ends_at = 0.0  # expected end of the oldest event
        self.due = 0.0  # ends_at minus the lead: from this time on, each pass queries it
        self.next_query = 0.0
        self.asked_at = 0.0  # last time that the oldest was not done; 0.0: not queried yet
        self.slept = False  # True if the timer was to wake the loop for it

    def expect(self, began_at: float, now: float, lead_seconds: float) -> None:
        """Expect the end of the oldest event, whose work began at ``began_at``."""
        work_seconds = self.queue[0].work_seconds
        self.ends_at = now if work_seconds is None else began_at + work_seconds
        self.due = max(self.ends_at - lead_seconds, now)
        self.slept = self.due > now
        self.next_query = next_query(self.due, now)
        self.asked_at = 0.0

    def drop_cancelled(self) -> float:
        """Drop cancelled watches from the front; return the sum of their ``work_seconds``."""
        skipped_seconds = 0.0
        while self.queue and self.queue[0].callback is None:
            skipped_seconds += self.queue.popleft().work_seconds or 0.0
        return skipped_seconds


def next_query(due: float, now: float) -> float:
    """Return the time of the next query of a stream's oldest event; ``now``: in the next pass."""
    if now < due:
        return min(due, now + MAX_SLEEP_SECONDS)
    waited = now - due
    if waited < POLL_BUDGET_SECONDS:
        return now
    return now + min(max(waited * BACKOFF_SHARE, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
