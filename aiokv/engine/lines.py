"""Parts of all waiting lines: waiters, and the number that one pass of the loop serves.

A lease can stand in three lines, one after the other: for blocks that another lease computes
(pending.py), for its salt's quota (quota.py), for capacity (waiting.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from aiokv.errors import AiokvError
    from aiokv.scheduler.admission import Admission

PER_PASS: Final = 16  # steps of one kind in one pass of the loop: well below 1 ms


class InPasses:
    """Calls ``step`` until it returns False, at most ``PER_PASS`` times per pass of the loop.

    Args:
        step: does one piece of the work; called again from its start if an exception such as
            ``KeyboardInterrupt`` ended it.
    """

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._next: asyncio.Handle | None = None
        self._again = False

    def start(self) -> None:
        """Begin now; what exceeds one pass follows in later passes. May be called by ``step``."""
        self._again = True
        if self._next is None:
            self._run()

    def _run(self) -> None:
        # Scheduled first: an interrupt in a step must not end the work.
        self._next = asyncio.get_running_loop().call_soon(self._run)
        for _ in range(PER_PASS):
            self._again = False
            if not self._step() and not self._again:
                self._next.cancel()
                self._next = None
                return


class Waiter:
    """One coroutine in a line.

    Attributes:
        lease_id: of the lease that waits.
        rank: lower goes first.
        failure: raised by ``wait``; None when the wait succeeded, or goes on.
    """

    __slots__ = ("_future", "_line", "_ticket", "failure", "lease_id", "rank")

    def __init__(self, lease_id: int, line: Admission[Any], rank: int) -> None:
        self.lease_id = lease_id
        self.rank = rank
        self.failure: Exception | None = None
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = line
        self._ticket = line.push(self, rank)

    @property
    def is_woken(self) -> bool:
        """True when the coroutine runs in the next pass, or was cancelled."""
        return self._future.done()

    @property
    def is_cancelled(self) -> bool:
        return self._future.cancelled()

    @property
    def is_first(self) -> bool:
        return self._line.first() is self

    async def wait(self) -> None:
        """Return, or raise ``failure``, once ``wake`` or ``end`` was called.

        Cancellation: the waiter is still in the line; the caller calls ``leave``.
        """
        await self._future
        if self.failure is not None:
            raise self.failure

    def rearm(self) -> None:
        """Make ``wait`` wait again, after it has returned."""
        self._future = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Let ``wait`` return. The waiter keeps its place."""
        if not self._future.done():
            self._future.set_result(None)

    def end(self, failure: Exception | None = None) -> None:
        """Let ``wait`` return, or raise ``failure``; the waiter leaves the line."""
        if self.failure is None:
            self.failure = failure
        self.wake()
        self.leave()

    def leave(self) -> None:
        """Idempotent."""
        self._line.leave(self._ticket)


class Wakeups:
    """Ends the waits of whole lines, ``PER_PASS`` waiters per pass of the loop."""

    def __init__(self) -> None:
        self._due: deque[tuple[list[Admission[Any]], int, Callable[[], AiokvError] | None]]
        self._due = deque()
        self._work = InPasses(self._end_one)

    def end_all(
        self,
        lines: Collection[Admission[Any]],
        *,
        up_to: int = sys.maxsize,
        failure: Callable[[], AiokvError] | None = None,
    ) -> None:
        """End the wait of all waiters in these lines.

        Args:
            lines: without ``up_to``, no waiter may enter them any more.
            up_to: only waiters of this rank or a lower one.
            failure: makes the error of each waiter; None where the wait has succeeded.
        """
        self._due.append((list(lines), up_to, failure))
        self._work.start()

    def _end_one(self) -> bool:
        if not self._due:
            return False
        lines, up_to, failure = self._due[0]
        waiter = lines[-1].first() if lines else None
        if waiter is not None and waiter.rank <= up_to:
            waiter.end(None if failure is None else failure())
        elif lines:
            lines.pop()
        else:
            self._due.popleft()
        return True

    def lines(self) -> list[Admission[Any]]:
        """Return the lines whose waiters are being ended."""
        return [line for lines, _, _ in self._due for line in lines]


def check_waiters(
    name: str,
    waiters: Mapping[int, Waiter],
    lines: Collection[Admission[Any]],
    ending: Collection[Admission[Any]],
    live: Collection[int],
) -> list[str]:
    """Return a description of each violated invariant of some lines.

    Args:
        name: of the lines, for the descriptions.
        waiters: all whose coroutine has not returned, by lease id.
        lines: those that may be entered.
        ending: those whose waiters are being ended.
        live: ids of the leases that are not released.
    """
    found = []
    standing: set[int] = set()
    for line in {id(line): line for line in (*lines, *ending)}.values():
        found += line.check()
        for waiter in line.in_order():
            standing.add(id(waiter))
            lease = f"lease {waiter.lease_id:#x}"
            if waiters.get(waiter.lease_id) is not waiter:
                found.append(f"{name}: an entry of {lease} belongs to no waiter")
            if waiter.lease_id not in live:
                found.append(f"{name}: {lease} waits, but it is released")
    found += [
        f"{name}: lease {lease_id:#x} waits in no line, and nothing will wake it"
        for lease_id, waiter in waiters.items()
        if not waiter.is_woken and id(waiter) not in standing
    ]
    return found
