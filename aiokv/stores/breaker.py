"""Breaker: stops calls to a store that fails, and finds out by single probes when it works again.

closed ── n failures of one operation in a row ──► open ── pause ──► probing ── success ──► closed
                                                    ▲                   │
                                                    └── longer pause ◄──┘ failure
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

FAILURES: Final = 3  # failures in a row of one operation that open the breaker
FIRST_PAUSE_SECONDS: Final = 0.5

State = Literal["closed", "open", "probing"]


class Breaker:
    """State of the calls of one direction, reading or writing, of a store.

    A success of an operation clears the failures of that operation only: a store whose lookups
    succeed while its loads fail stays suspect, and each return to ``open`` doubles the pause.

    Args:
        on_change: called with the new state and the reason when a store becomes unavailable or
            available again.
        longest_pause_seconds: limit of the pause before a probe.

    Attributes:
        state: ``"closed"``: calls pass; ``"open"``: calls are refused; ``"probing"``: calls are
            refused while one probe is in flight.
        opened: number of times that the breaker has opened.
    """

    def __init__(
        self, on_change: Callable[[State, str], None], longest_pause_seconds: float
    ) -> None:
        self._on_change = on_change
        self._longest_pause_seconds = longest_pause_seconds
        self._failures: dict[str, int] = {}
        self._pause_seconds = FIRST_PAUSE_SECONDS / 2
        self._probe_at = 0.0
        self.state: State = "closed"
        self.opened = 0

    def may_probe(self, now: float) -> bool:
        """Return True, once, when the pause has passed: the caller must make a probe."""
        if self.state != "open" or now < self._probe_at:
            return False
        self.state = "probing"
        return True

    def succeed(self, operation: str) -> None:
        """Note that an operation of the store has succeeded."""
        if self._failures:
            self._failures.pop(operation, None)
            if not self._failures:
                self._pause_seconds = FIRST_PAUSE_SECONDS / 2
        if self.state != "closed":
            self.state = "closed"
            for suspect in self._failures:
                self._failures[suspect] = min(self._failures[suspect], FAILURES - 1)
            self._on_change("closed", "")

    def fail(self, operation: str, reason: str, now: float) -> None:
        """Note that an operation of the store has failed, or exceeded its deadline."""
        self._failures[operation] = failures = self._failures.get(operation, 0) + 1
        if self.state == "open" or (self.state == "closed" and failures < FAILURES):
            return
        was_closed = self.state == "closed"
        self._pause_seconds = min(2 * self._pause_seconds, self._longest_pause_seconds)
        self._probe_at = now + self._pause_seconds
        self.state = "open"
        if was_closed:
            self.opened += 1
            self._on_change("open", reason)

    def skip_probe(self, now: float) -> None:
        """Record that no probe was made, because earlier operations have not ended."""
        if self.state == "probing":
            self.state = "open"
            self._probe_at = now + self._pause_seconds
