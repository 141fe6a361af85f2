"""StateGuard: breaks an engine or a rank when an exception leaves its state unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StateGuard:
    """Breaks an engine or a rank when an exception leaves its state unknown.

    Transitions of the scheduler, the application of their effects and the passes of the poller run
    to their end or raise an ``Exception`` before they change anything. ``KeyboardInterrupt``,
    ``SystemExit`` and ``MemoryError`` may end them at any line. No code repairs the state:
    the engine refuses all calls from then on. These three places, and the callback for messages of
    a rank, pass each exception to ``note`` and raise it again; no other code guards against it.

    Attributes:
        failure: first exception that left the state unknown; None before.
    """

    __slots__ = ("_on_break", "failure")

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._on_break: Callable[[BaseException], None] = _ignore

    def open(self, on_break: Callable[[BaseException], None]) -> None:
        """Call ``on_break(failure)`` once, inside the ``except`` block of the guarded code."""
        self._on_break = on_break

    def note(self, error: BaseException) -> None:
        """Break the engine, unless ``error`` is an ordinary exception."""
        is_ordinary = isinstance(error, Exception) and not isinstance(error, MemoryError)
        if not is_ordinary and self.failure is None:
            self.failure = error
            self._on_break(error)


def _ignore(error: BaseException) -> None:
    """Take the place of ``on_break`` before ``open``."""
