"""Slots: a bounded number of operations at a time; the most urgent waiting operation goes first."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class Slots:
    """Slots of the operations of one store.

    An operation keeps its slot until it has really ended, also beyond its deadline.

    Args:
        limit: operations at a time, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._order = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def take(self, priority: int, deadline: float) -> bool:
        """Wait for a slot until ``deadline``, a time of the loop; return False without one.

        Cancellation: no slot is taken.
        """
        if self._free > 0:
            self._free -= 1
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._order), future))
        try:
            async with asyncio.timeout_at(deadline):
                await future
        except TimeoutError:
            if not future.done() or future.cancelled():
                return False
        except BaseException:
            if future.done() and not future.cancelled():
                self.give_back()
            raise
        return True

    def give_back(self) -> None:
        """Give a slot back, to the most urgent waiting operation if there is one."""
        while self._waiting:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
