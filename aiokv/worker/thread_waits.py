"""Waits of ordinary threads for the thread of a loop."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from aiokv.base.checks import timeout as checked_timeout

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadline:
    """The time at which a wait of several parts ends.

    Args:
        timeout: seconds from now; None and infinity for no deadline.

    Raises:
        UsageError: ``timeout`` is neither None nor a number.

    Attributes:
        timeout: as given, for messages.
    """

    __slots__ = ("_at", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = checked_timeout(timeout)
        self._at = None if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Seconds until the deadline, at least 0.0; None without a deadline."""
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)


class ThreadWaits:
    """Threads that wait for conditions of one object, which a loop changes.

    No lock is held across a switch of threads: the loop changes the object, then calls ``wake``,
    and a waiting thread registers, then reads the object. ``wake`` may be repeated.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        # No lock is needed, because single operations of a list are atomic.
        self._waiting: list[tuple[Callable[[], bool], SimpleQueue[None]]] = []

    def wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Block the calling thread, without the GIL, until ``condition()`` is true.

        Args:
            condition: any thread may call it; it is quick and raises nothing.
            deadline: deadline of the wait.

        Returns:
            False when the deadline has passed and the condition is false.
        """
        if condition():
            return True
        signal: SimpleQueue[None] = SimpleQueue()
        entry = (condition, signal)
        self._waiting.append(entry)
        try:
            while not condition():
                signal.get(timeout=deadline.left())
        except Empty:
            return condition()
        finally:
            self._waiting.remove(entry)
        return True

    def wake(self) -> None:
        """End the waits whose conditions are true. The object has changed before."""
        if self._waiting:
            for condition, signal in tuple(self._waiting):
                if condition():
                    signal.put(None)
