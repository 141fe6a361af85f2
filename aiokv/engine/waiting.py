"""Leases in line for capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.engine.lines import InPasses, Waiter, Wakeups, check_waiters
from aiokv.scheduler.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aiokv.errors import AiokvError
    from aiokv.lease import Lease


class _Waiter(Waiter):
    """``takes_turn``: it is told when it is first, and takes its grant itself."""

    __slots__ = ("lease", "num_tokens", "takes_turn")

    def __init__(
        self, lease: Lease, num_tokens: int, takes_turn: bool, line: Admission[Any], rank: int
    ) -> None:
        super().__init__(lease._live_id(), line, rank)
        self.lease = lease
        self.num_tokens = num_tokens
        self.takes_turn = takes_turn


class CapacityQueue:
    """Grants in order of priority, then of arrival; a waiting lease holds nothing.

    Args:
        grant: ``(lease, num_tokens)`` -> False when there is not enough room now.
    """

    def __init__(self, grant: Callable[[Lease, int], bool]) -> None:
        self._grant = grant
        self._line: Admission[_Waiter] = Admission()
        self._waiters: dict[int, _Waiter] = {}  # by lease id
        self._grants = InPasses(self._serve_first)
        self._wakeups = Wakeups()

    def __len__(self) -> int:
        return len(self._line)

    def would_be_first(self, priority: int) -> bool:
        """Return whether a request that came now would go before all others; some wait."""
        return priority < self._line.first_priority()

    async def wait(
        self, lease: Lease, num_tokens: int, priority: int, *, takes_turn: bool = False
    ) -> None:
        """Return once the lease was granted.

        Args:
            lease: not granted, and not in this line.
            num_tokens: positions, absolute.
            priority: lower goes first.
            takes_turn: grant only in the waiter's own task, a pass of the loop later: for a grant
                that cannot be taken back.

        Cancellation: the lease has left the line. A grant that crossed the cancellation stays with
        the lease, and the caller takes it back; with ``takes_turn`` none can.
        """
        waiter = _Waiter(lease, num_tokens, takes_turn, self._line, priority)
        self._waiters[waiter.lease_id] = waiter
        try:
            if waiter.is_first:
                self.pump()
            await waiter.wait()
            while takes_turn and not self._take_turn(waiter):
                await waiter.wait()
        finally:
            del self._waiters[waiter.lease_id]
            was_first = waiter.is_first
            waiter.leave()
            if was_first:
                self.pump()

    def _take_turn(self, waiter: _Waiter) -> bool:
        """Return False if there is no room, or another waiter is first in line by now."""
        waiter.rearm()
        return waiter is self._line.first() and self._grant(waiter.lease, waiter.num_tokens)

    def pump(self) -> None:
        """Grant to the first in line as long as there is room."""
        if self._line:
            self._grants.start()

    def _serve_first(self) -> bool:
        """Serve the first waiter; return whether the next one may be granted, too."""
        waiter = self._line.first()
        if waiter is None:
            return False
        if waiter.is_cancelled:
            waiter.leave()
            return True
        if waiter.takes_turn:
            waiter.wake()
            return False  # it stays first until it has taken its grant, or has left
        try:
            granted = self._grant(waiter.lease, waiter.num_tokens)
        except Exception as error:  # the waiter's own error, not of the task that made room
            waiter.end(error)
            return True
        if granted:
            waiter.end()
        return granted

    def entries(self) -> list[tuple[Lease, int]]:
        """Return (lease, num_tokens) of all waiters, first in line first."""
        return [(waiter.lease, waiter.num_tokens) for waiter in self._line.in_order()]

    def drop(self, lease_id: int, failure: AiokvError) -> None:
        """Fail the waiter of a lease, if it has one."""
        if waiter := self._waiters.get(lease_id):
            waiter.end(failure)
            self.pump()

    def fail_all(self, failure: Callable[[], AiokvError]) -> None:
        """Fail all waiters, each with an error of its own."""
        line, self._line = self._line, Admission()
        self._wakeups.end_all([line], failure=failure)

    def check(self, live: Collection[int]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            live: ids of the leases that are not released.
        """
        lines = self._wakeups.lines()
        return check_waiters("capacity line", self._waiters, [self._line], lines, live)
