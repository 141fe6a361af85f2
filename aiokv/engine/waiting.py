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
    __slots__ = ("future", "lease", "num_tokens")

    def __init__(self, lease: Lease, num_tokens: int, future: asyncio.Future[None]) -> None:
        self.lease = lease
        self.num_tokens = num_tokens
        self.future = future


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

    async def wait(self, lease: Lease, num_tokens: int, priority: int) -> None:
        """Return once the lease was granted.

        Cancellation: the lease has left the line. A grant that crossed the cancellation stays with
        the lease; the caller takes it back.
        """
        waiter = _Waiter(lease, num_tokens, asyncio.get_running_loop().create_future())
        ticket = self._admission.push(waiter, priority)
        try:
            self.pump()
            await waiter.future
        finally:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.exception()  # seen, even if a cancellation came first
            self._admission.leave(ticket)
            self.pump()  # whoever was behind may be first now

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
            if not waiter.future.done():
                try:
                    granted = self._grant(waiter.lease, waiter.num_tokens)
                except AiokvError as error:
                    waiter.future.set_exception(error)
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
            if not waiter.future.done():
                waiter.future.set_exception(error)
            self._admission.drop_first()
