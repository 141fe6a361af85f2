"""What the poller watches, and when it is worth while to ask."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from aiokv.worker.device.base import Event
    from aiokv.worker.poller import EventPoller

    Callback = Callable[[BaseException | None], None]

POLL_BUDGET_SECONDS: Final = 200e-6  # then polling every pass stops paying for its CPU time
MIN_BACKOFF_SECONDS: Final = 50e-6
MAX_BACKOFF_SECONDS: Final = 1e-3
BACKOFF_SHARE: Final = 0.125  # sleep this share of the time overdue
MAX_SLEEP_SECONDS: Final = 2e-3  # bounds what a wrong expectation can cost; 500 queries a second


class Watch:
    """A watched event; ``cancel()`` detaches the callback and does nothing to the event."""

    __slots__ = ("_poller", "callback", "event", "key", "work_seconds")

    def __init__(
        self,
        poller: EventPoller,
        event: Event,
        key: Hashable,
        callback: Callback,
        work_seconds: float | None,
    ) -> None:
        self._poller = poller
        self.event = event
        self.key = key
        self.callback: Callback | None = callback
        self.work_seconds = work_seconds

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._poller._discard(self)


class Stream:
    """Events that finish in order, and when to ask the oldest."""

    __slots__ = ("asked_at", "due", "ends_at", "key", "next_query", "queue", "slept")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.queue: deque[Watch] = deque()
        self.ends_at = 0.0  # of the oldest, as expected
        self.due = 0.0  # ends_at less the lead: from here on it is asked in every pass
        self.next_query = 0.0
        self.asked_at = 0.0  # the last time that the oldest was not done; 0.0: not asked yet
        self.slept = False  # the timer was to wake the loop for it

    def expect(self, began_at: float, now: float, lead_seconds: float) -> None:
        """The work of the oldest event began then."""
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
    """When a stream's oldest event is asked next; ``now`` means in the next pass."""
    if now < due:
        return min(due, now + MAX_SLEEP_SECONDS)
    waited = now - due
    if waited < POLL_BUDGET_SECONDS:
        return now
    return now + min(max(waited * BACKOFF_SHARE, MIN_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
