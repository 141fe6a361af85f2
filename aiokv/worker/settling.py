"""Coroutines that wait until the transfers in flight have been reported."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ReportWaiters:
    """Waiters for the reports of transfers."""

    def __init__(self) -> None:
        self._waiting: list[tuple[set[int], asyncio.Future[None]]] = []

    async def wait(self, transfer_ids: Iterable[int]) -> None:
        """Wait until all these transfers have been reported; without any, do not suspend.

        Cancellation: stops waiting; the transfers go on.
        """
        unreported = set(transfer_ids)
        if not unreported:
            return
        entry = (unreported, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    def end_all(self) -> None:
        """Resume all coroutines: no report follows."""
        for _, settled in self._waiting:
            if not settled.done():
                settled.set_result(None)

    def note_report(self, transfer_id: int) -> None:
        """Resume the coroutines for which this was the last report. Idempotent."""
        for unreported, settled in self._waiting:
            unreported.discard(transfer_id)
            if not unreported and not settled.done():
                settled.set_result(None)
