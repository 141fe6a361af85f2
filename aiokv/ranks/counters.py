"""Layer counters of a rank's transfers, for its model runner."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from aiokv.worker.layers import LayerDoneCounter

KEPT_COUNTERS: Final = 4096  # of ended transfers, for a runner that waits late


class Counters:
    """Layer counters by transfer id.

    A runner may ask for one before the plan has arrived, and after its transfer has ended.
    """

    def __init__(self) -> None:
        self._counters: dict[int, LayerDoneCounter] = {}
        self._ended_ids: deque[int] = deque()
        self._newest_id = 0
        self._expected: dict[int, list[asyncio.Future[None]]] = {}

    def add(self, transfer_id: int, counter: LayerDoneCounter) -> None:
        """Add the counter of a plan that has arrived."""
        self._counters[transfer_id] = counter
        self._newest_id = max(self._newest_id, transfer_id)
        for arrival in self._expected.pop(transfer_id, ()):
            if not arrival.done():
                arrival.set_result(None)

    def note_end(self, transfer_id: int) -> None:
        """Note the end of a transfer, and drop the counters of the oldest ended ones."""
        self._ended_ids.append(transfer_id)
        while len(self._ended_ids) > KEPT_COUNTERS:
            self._counters.pop(self._ended_ids.popleft(), None)

    async def get(self, transfer_id: int) -> LayerDoneCounter:
        """Return the counter of a transfer; wait until its plan has arrived.

        Raises:
            UsageError: the transfer has ended so long ago that its counter was dropped.
            ClosedError: the plan will not arrive.

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
        """Drop all counters; plans that have not arrived will not arrive."""
        for arrivals in self._expected.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(ClosedError(reason))
        self._expected.clear()
        self._counters.clear()
        self._ended_ids.clear()
