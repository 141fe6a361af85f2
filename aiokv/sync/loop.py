"""SharedLoop: asyncio's loop, whose turn other threads borrow while it waits for events."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from asyncio import _get_running_loop, _set_running_loop
from typing import TYPE_CHECKING, Any, TypeVarTuple

from aiokv import _native

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

Ts = TypeVarTuple("Ts")


class SharedLoop(asyncio.SelectorEventLoop):
    """A loop whose code other threads run, too, so that a call to it needs no switch of threads.

    At any time, one thread has the *turn*: that of the loop, except while it waits for events.
    Another thread then borrows the turn, and runs functions of the loop as its callbacks do. What
    they schedule wakes the loop when the turn is given back.
    """

    def __init__(self) -> None:
        self._turn = _native.Turn()
        self._events = _Events(self._turn)
        super().__init__(self._events)
        self._turn.set_wake_socket(self._csock.fileno())  # type: ignore[attr-defined]

    def call_here(self, function: Callable[..., bool], *args: Any) -> bool:
        """Call ``function(*args)`` in this thread, as a callback of the loop.

        Returns:
            Its value; False, without the call, if the loop does not wait for events, if callbacks
            wait for the loop, if another thread has the turn, or if this thread runs a loop.

        Raises:
            BaseException: the error of the function.
        """
        return _get_running_loop() is None and self._turn.call(self._call, function, args)

    def _call(self, function: Callable[..., bool], args: tuple[Any, ...]) -> bool:
        """Call a function with the turn, unless callbacks that were scheduled before wait."""
        if self._ready:  # type: ignore[attr-defined]
            return False
        try:
            _set_running_loop(self)
            return function(*args)
        finally:
            _set_running_loop(None)

    # --- what wakes the loop, when a thread with its turn calls it --------------------------------

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._turn.wake()  # before the callback is scheduled: no interrupt can come between both
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if when < self._events.until:
            self._turn.wake()
        return super().call_at(when, callback, *args, context=context)

    def _check_thread(self) -> None:
        """Check the calling thread, in debug mode: the one with the turn is right, too."""
        if _get_running_loop() is not self:
            super()._check_thread()  # type: ignore[misc]


class _Events(selectors.DefaultSelector):
    """Events of the descriptors of a loop, whose turn it offers while it waits.

    Attributes:
        until: time at which the present wait ends without an event.
    """

    def __init__(self, turn: _native.Turn) -> None:
        super().__init__()
        self._turn = turn
        self.until = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:  # otherwise callbacks are due
            self.until = math.inf if timeout is None else time.monotonic() + timeout
            self._turn.offer()
        try:
            events = super().select(timeout)
        finally:
            was_borrowed = self._turn.reclaim()
        if was_borrowed:
            # Its descriptor may have been closed, and another one may have got its number.
            current = self.get_map()
            return [(key, mask) for key, mask in events if current.get(key.fd) is key]
        return events
