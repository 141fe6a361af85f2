"""Counters of the transfers that a rank knows of, for its model runner."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from aiokv.worker.layers import LayerDoneCounter

KEPT_COUNTERS: Final = 4096  # of ended transfers, for a runner that asks late


class Counters:
    """By transfer id; a runner may ask before a plan has come, and after its transfer has ended."""

    def __init__(self) -> None:
        self._counters: dict[int, LayerDoneCounter] = {}
        self._ended_ids: deque[int] = deque()
        self._newest_id = 0
        self._expected: dict[int, list[asyncio.Future[None]]] = {}

    def add(self, transfer_id: int, counter: LayerDoneCounter) -> None:
        """The plan has come."""
        self._counters[transfer_id] = counter
        self._newest_id = max(self._newest_id, transfer_id)
        for arrival in self._expected.pop(transfer_id, ()):
            if not arrival.done():
                arrival.set_result(None)

    def note_end(self, transfer_id: int) -> None:
        """The oldest of those that have ended are forgotten."""
        self._ended_ids.append(transfer_id)
        while len(self._ended_ids) > KEPT_COUNTERS:
            self._counters.pop(self._ended_ids.popleft(), None)

    async def get(self, transfer_id: int) -> LayerDoneCounter:
        """Wait until the plan has come.

        Raises:
            UsageError: it has ended so long ago that it is forgotten.
            ClosedError: it will not come.

        Cancellation: nothing changed.
        """
        if transfer_id not in self._counters:
            if transfer_id <= self._newest_id:
                raise UsageError(f"transfer {transfer_id} ended long ago, or before a restart")
            await self._arrival(transfer_id)
        return self._counters[transfer_id]

    async def _arrival(self, transfer_id: int) -> None:
        arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected.setdefault(transfer_id, []).append(arrival)
        try:
            await arrival
        finally:
            waiting = self._expected.get(transfer_id, [])
            if arrival in waiting:
                waiting.remove(arrival)
                if not waiting:
                    del self._expected[transfer_id]

    def clear(self, reason: str) -> None:
        """Forget all; what has not come will not come."""
        for arrivals in self._expected.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(ClosedError(reason))
        self._expected.clear()
        self._counters.clear()
        self._ended_ids.clear()
