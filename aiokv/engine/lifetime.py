"""Lifetime: the phase, the loop and the failure of an engine, and the checks of each call."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

from aiokv.errors import BrokenEngineError, ClosedError, UsageError
from aiokv.scheduler.guarded import broken

if TYPE_CHECKING:
    from collections.abc import Callable

_running_loop = asyncio._get_running_loop


class Phase(Enum):
    """Phases of an engine, in order; the value completes the sentence "the engine ..."."""

    NEW = "is not entered"
    OPEN = "is open"
    CLOSING = "is closing"
    CLOSED = "is closed"
    ABANDONED = "belongs to the parent process, which entered it before os.fork()"


PhaseName = Literal["new", "open", "closing", "closed", "abandoned"]
_NAMES: Final[dict[Phase, PhaseName]] = {
    Phase.NEW: "new",
    Phase.OPEN: "open",
    Phase.CLOSING: "closing",
    Phase.CLOSED: "closed",
    Phase.ABANDONED: "abandoned",
}


class Lifetime:
    """State that every method of an engine checks first.

    Attributes:
        phase: current phase of the engine.
        failure: error that broke the engine; None while the engine can serve.
        is_running: True from ``async with`` until the engine is closed.
        is_unknown: True if the failure has left the state of the engine unknown.
        is_usable: True while the engine is running and its state is known: leases can be used.
    """

    __slots__ = (
        "_loop",
        "_loop_runs",
        "_serves",
        "failure",
        "is_running",
        "is_unknown",
        "is_usable",
        "phase",
    )

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.failure: BaseException | None = None
        self.is_unknown = False
        self.is_running = False
        self.is_usable = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_runs: Callable[[], bool] = lambda: False
        self._serves = False  # True while open and not broken

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop that the engine was entered on.

        Raises:
            UsageError: the engine was not entered.
        """
        if self._loop is None:
            raise UsageError("CacheEngine must be entered with 'async with' before use")
        return self._loop

    @property
    def entered_loop(self) -> asyncio.AbstractEventLoop | None:
        """Event loop that the engine was entered on; None if it was not entered."""
        return self._loop

    @property
    def phase_name(self) -> PhaseName:
        """Name of the phase, for records."""
        return _NAMES[self.phase]

    @property
    def is_closing(self) -> bool:
        """True if the engine is closing or closed: it refuses new work."""
        return self.phase not in (Phase.NEW, Phase.OPEN)

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the engine to its loop.

        Raises:
            UsageError: the engine was entered before.
        """
        if self.phase is not Phase.NEW:
            raise UsageError(
                "this CacheEngine was entered before; it can be entered once",
                hint="make a new CacheEngine",
            )
        self._loop = loop
        self._loop_runs = loop.is_running

    def open(self) -> None:
        """Accept calls."""
        self.is_running = self.is_usable = True
        self.phase = Phase.OPEN
        self._serves = True

    def close(self, phase: Phase) -> None:
        """Enter ``CLOSING``, where open leases may still be used, or one of the last phases."""
        self.phase = phase
        self._serves = False
        if phase is not Phase.CLOSING:
            self.is_running = self.is_usable = False

    def fail(self, error: BaseException) -> None:
        """Refuse new work: the device or a rank has failed."""
        self.failure = error
        self._serves = False

    def give_up(self, error: BaseException) -> None:
        """Refuse all calls: ``error`` has left the state of the engine unknown."""
        self.is_usable = False
        self.is_unknown = True
        self.fail(error)

    def repair(self) -> None:
        """Accept calls again after ``fail``."""
        self.failure = None
        self._serves = self.phase is Phase.OPEN

    def check_open(self) -> None:
        """Check a call that starts new work.

        Raises:
            ClosedError: the engine is closing or closed.
            BrokenEngineError: the device failed, or a rank was lost.
            UsageError: the call is made outside the engine's loop.
        """
        if self._serves and _running_loop() is self._loop:
            return
        self.check_loop()
        if self.is_closing:
            raise ClosedError(f"the engine {self.phase.value}")
        if self.failure is not None:
            raise BrokenEngineError(
                f"the engine is broken by an earlier failure: {self.failure}"
            ) from self.failure

    def check_loop(self) -> None:
        """Check a call that open leases may make until the engine is closed.

        Raises:
            ClosedError: the engine is closed.
            BrokenEngineError: a failure has left the state of the engine unknown.
            UsageError: the call is made outside the engine's loop.
        """
        if self.is_usable and _running_loop() is self._loop:
            return
        self.check_running()
        raise self.new_error()

    def new_error(self) -> BrokenEngineError:
        """Return the error of calls after ``give_up``."""
        return broken(self.failure)

    def check_running(self) -> None:
        """Check a call that a broken engine makes, too.

        Raises:
            ClosedError: the engine is closed.
            UsageError: the call is made outside the engine's loop.
        """
        if self.is_running and _running_loop() is self._loop:
            return
        if not self.is_running:
            if self.is_closing:
                raise ClosedError(f"the engine {self.phase.value}")
            raise UsageError("CacheEngine must be entered with 'async with' before use")
        raise UsageError(
            "the engine was called outside the event loop that it was entered on",
            hint="call it on that loop, e.g. with loop.call_soon_threadsafe()",
        )

    def check_thread(self) -> None:
        """Check the thread of a call that reads state of the loop; the engine need not be open.

        Raises:
            UsageError: the loop runs in another thread.
            BrokenEngineError: a failure has left the state of the engine unknown.
        """
        if not self.is_running:
            return
        if self.is_unknown:
            raise self.new_error()
        if _running_loop() is not self._loop and self._loop_runs():
            raise UsageError(
                "the engine was called in a thread other than the thread of its event loop",
                hint="read the values on the loop and pass them on; any thread may use block_table "
                "and statistics()",
            )
