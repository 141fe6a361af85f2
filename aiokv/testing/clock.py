"""A clock that stands still until the test advances it, for asyncio and uvloop.

with asyncio.Runner(loop_factory=clocked_loop(uvloop.Loop)) as runner: ...

clock = running_clock()
waiting = asyncio.create_task(lease.allocate(100, timeout=30))
await clock.advance(31)       # the deadline passes, and takes no time

The clock replaces the loop's own, so that everything that waits on the loop follows it:
``asyncio.sleep``, ``asyncio.timeout``, ``call_later``, and every timeout and TTL of aiokv. Threads,
devices and measurements (``time.monotonic``) use real time.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self, cast

from aiokv.testing.loops import spin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextvars import Context

_PASSES: Final = 10  # passes of the loop after each timer, for resumed tasks


class Clock:
    """The time of one loop.

    Attributes:
        now: seconds; starts at 1000, so that a confusion of deadline and duration is noticed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = 1000.0
        self._loop = loop
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = count()

    @property
    def timers(self) -> int:
        """Number of timers; 0 when no coroutine waits for a time."""
        return sum(not timer.cancelled() for _, _, timer in self._timers)

    async def advance(
        self, seconds: float, settle: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Advance the time; timers expire one by one, in order, each at its own time.

        The loop makes some passes after each timer, and at the end. Timers that are set meanwhile
        expire, too, if they are due.

        Args:
            seconds: 0 or more.
            settle: awaited after these passes while the time stands still, such as
                ``engine.drain`` for copies in native threads.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; it must be at least 0")
        end = self.now + seconds
        await spin(_PASSES)  # lets tasks set the timers that they are about to set
        while self._timers and self._timers[0][0] <= end:
            due, _, timer = heapq.heappop(self._timers)
            if timer.cancelled():
                continue
            self.now = max(self.now, due)
            self._loop.call_soon(timer.expire, context=timer.context)
            await spin(_PASSES)
            if settle is not None:
                await settle()
                await spin(_PASSES)
        self.now = end
        await spin(_PASSES)

    def set(
        self, when: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> asyncio.TimerHandle:
        """Set a timer for the time ``when``."""
        timer = _Timer(when, callback, args, self._loop, context)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer


class _Timer(asyncio.TimerHandle):
    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Any,
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self._call = (callback, args)
        self.context = context

    def expire(self) -> None:
        """Call the callback, from a callback of the loop, which reports exceptions."""
        if not self.cancelled():
            callback, args = self._call
            callback(*args)


class _Clocked:
    """Mixin of a loop, whose timers belong to the clock."""

    clock: Clock

    def __new__(cls) -> Self:
        loop = super().__new__(cls)
        loop.clock = Clock(cast("asyncio.AbstractEventLoop", loop))  # __init__ may ask for the time
        return loop

    def time(self) -> float:
        return self.clock.now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.clock.set(when, callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.clock.set(self.clock.now + delay, callback, args, context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore the call of asyncio; ``advance`` drops the cancelled timer when it is due."""


def clocked_loop(
    base: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop,
) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory of loops whose time only :meth:`Clock.advance` changes.

    Args:
        base: ``asyncio.SelectorEventLoop``, ``uvloop.Loop``, or any other with ``time``,
            ``call_at`` and ``call_later``.
    """
    return cast(
        "Callable[[], asyncio.AbstractEventLoop]", type("ClockedLoop", (_Clocked, base), {})
    )


def running_clock() -> Clock:
    """Return the clock of the running loop.

    Raises:
        RuntimeError: :func:`clocked_loop` has not created that loop.
    """
    clock = getattr(asyncio.get_running_loop(), "clock", None)
    if not isinstance(clock, Clock):
        raise RuntimeError("the running loop has no Clock; create it with clocked_loop()")
    return clock
