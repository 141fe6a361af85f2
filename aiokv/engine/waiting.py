"""Leases in line for capacity."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError
from aiokv.scheduler.admission import Admission

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.lease import Lease


class _Waiter:
    """``takes_turn``: it is told when it is first, and takes its grant itself."""

    __slots__ = ("failure", "future", "lease", "num_tokens", "takes_turn")

    def __init__(self, lease: Lease, num_tokens: int, takes_turn: bool) -> None:
        self.lease = lease
        self.num_tokens = num_tokens
        self.takes_turn = takes_turn
        self.failure: AiokvError | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: AiokvError) -> None:
        self.failure = error
        if not self.future.done():
            self.future.set_exception(error)


class CapacityQueue:
    """Grants in order of priority, then of arrival; a waiting lease holds nothing.

    Args:
        grant: ``(lease, num_tokens)`` -> False when there is not enough room now.
    """

    def __init__(self, grant: Callable[[Lease, int], bool]) -> None:
        self._grant = grant
        self._admission: Admission[_Waiter] = Admission()
        self._pumping = False
        self._pump_again = False

    def __len__(self) -> int:
        return len(self._admission)

    async def wait(
        self, lease: Lease, num_tokens: int, priority: int, *, takes_turn: bool = False
    ) -> None:
        """Return once the lease was granted.

        Args:
            lease: not granted.
            num_tokens: positions, absolute.
            priority: lower goes first.
            takes_turn: grant only in the waiter's own task, a pass of the loop later: for a grant
                that cannot be taken back.

        Cancellation: the lease has left the line. A grant that crossed the cancellation stays with
        the lease, and the caller takes it back; with ``takes_turn`` none can.
        """
        waiter = _Waiter(lease, num_tokens, takes_turn)
        ticket = self._admission.push(waiter, priority)
        try:
            self.pump()
            await waiter.future
            while takes_turn and not self._take_turn(waiter):
                await waiter.future
        finally:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.exception()  # seen, even if a cancellation came first
            self._admission.leave(ticket)
            self.pump()  # whoever was behind may be first now

    def _take_turn(self, waiter: _Waiter) -> bool:
        """False: it is still first in line, and will be told again."""
        if waiter.failure is not None:
            raise waiter.failure
        waiter.future = asyncio.get_running_loop().create_future()
        return self._grant(waiter.lease, waiter.num_tokens)

    def pump(self) -> None:
        """Grant to whoever is first, as long as there is room."""
        self._pump_again = True
        if self._pumping:  # a grant has set blocks free: the call further up goes on with those
            return
        self._pumping = True
        try:
            while self._pump_again:
                self._pump_again = False
                self._grant_in_order()
        finally:
            self._pumping = False

    def _grant_in_order(self) -> None:
        while (waiter := self._admission.first()) is not None:
            if waiter.takes_turn:
                if not waiter.future.done():
                    waiter.future.set_result(None)
                return  # it stays first until it has taken its grant, or has left
            if not waiter.future.done():
                try:
                    granted = self._grant(waiter.lease, waiter.num_tokens)
                except AiokvError as error:
                    waiter.fail(error)
                else:
                    if not granted:
                        return
                    waiter.future.set_result(None)
            self._admission.drop_first()

    def entries(self) -> list[tuple[Lease, int]]:
        """(lease, num_tokens) of everybody, first in line first."""
        return [(waiter.lease, waiter.num_tokens) for waiter in self._admission.in_order()]

    def fail_all(self, error: AiokvError) -> None:
        """Send everybody home with ``error``."""
        while (waiter := self._admission.first()) is not None:
            waiter.fail(error)
            self._admission.drop_first()
