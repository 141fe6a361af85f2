"""Layer counters of a rank's transfers, for its model runner."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, UsageError
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from aiokv.base.plan import TransferPlan
    from aiokv.worker.layers import LayerDoneCounter

KEPT_COUNTERS: Final = 4096  # counters of ended transfers, for a runner that waits late


class Counters:
    """Layer counters by transfer id.

    A runner may ask for one before the plan has arrived, and after its transfer has ended. Only the
    loop changes the table; any thread may call ``find`` and ``is_forgotten``.
    """

    def __init__(self) -> None:
        self._counters: dict[int, tuple[TransferPlan, LayerDoneCounter]] = {}
        self._ended_ids: deque[int] = deque()
        self._newest_id = 0
        self._newest_forgotten_id = 0
        self._expected: dict[int, list[asyncio.Future[None]]] = {}

    def add(self, plan: TransferPlan, counter: LayerDoneCounter) -> None:
        """Add the counter of a plan that has arrived."""
        transfer_id = plan.transfer_id
        self._counters[transfer_id] = plan, counter
        self._newest_id = max(self._newest_id, transfer_id)
        for arrival in self._expected.pop(transfer_id, ()):
            if not arrival.done():
                arrival.set_result(None)

    def note_end(self, transfer_id: int) -> None:
        """Note the end of a transfer, and drop the counters of the oldest ended ones."""
        self._ended_ids.append(transfer_id)
        while len(self._ended_ids) > KEPT_COUNTERS:
            oldest = self._ended_ids.popleft()
            self._newest_forgotten_id = max(self._newest_forgotten_id, oldest)
            self._counters.pop(oldest, None)

    def abandon(self, reason: str) -> None:
        """End the waits of threads for transfers that still move, whose ends will stay unknown."""
        for _, counter in self._counters.values():
            if not counter.at_rest:
                counter.abandon(CopyError(0, reason))

    def find(self, transfer_id: int) -> tuple[TransferPlan, LayerDoneCounter] | None:
        """Return a transfer; None before its plan has arrived, and when it was forgotten."""
        return self._counters.get(transfer_id)

    def is_forgotten(self, transfer_id: int) -> bool:
        """True for a transfer that was dropped, because it ended long ago or before a restart.

        Ids ascend, but for a few plans that are sent in another order: an id is forgotten when an
        id that is not lower was dropped.
        """
        return transfer_id <= self._newest_forgotten_id and transfer_id not in self._counters

    async def get(self, transfer_id: int) -> LayerDoneCounter:
        """Return the counter of a transfer; wait until its plan has arrived.

        Raises:
            UsageError: the transfer has ended so long ago that its counter was dropped.
            ClosedError: the plan will not arrive.

        Cancellation: nothing changed.
        """
        if transfer_id not in self._counters:
            if self.is_forgotten(transfer_id):
                raise UsageError(f"transfer {transfer_id} ended long ago, or before a restart")
            await self._arrival(transfer_id)
        return self._counters[transfer_id][1]

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
        """Drop the counters of ended transfers, and fail waits for plans that have not arrived."""
        for arrivals in self._expected.values():
            for arrival in arrivals:
                if not arrival.done():
                    arrival.set_exception(ClosedError(reason))
        self._expected.clear()
        self._newest_forgotten_id = self._newest_id
        for transfer_id in list(self._counters):
            if self._counters[transfer_id][1].at_rest:
                del self._counters[transfer_id]
        self._ended_ids.clear()
