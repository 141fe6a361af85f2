"""Outbox: the events of a rank for its manager, one message per pass of its loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.ranks.messages import Reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.plan import TransferReport


class Outbox:
    """Collects the events of one pass of the loop.

    Args:
        send: sends a message.
        finished_step: returns the newest step that has finished, with all steps before it.

    Attributes:
        generation: 0 while none runs: nothing is reported then.
    """

    def __init__(self, send: Callable[[Reports], None], finished_step: Callable[[], int]) -> None:
        self._send = send
        self._finished_step = finished_step
        self._arrived: dict[int, list[int]] = {}
        self._ended: list[TransferReport] = []
        self._overdue: list[TransferReport] = []
        self._scheduled = False
        self.generation = 0

    def begin(self, generation: int) -> None:
        """Forget the events of an earlier generation; 0 for the time between two."""
        self.generation = generation
        self._arrived, self._ended, self._overdue = {}, [], []

    def note_layer(self, transfer_id: int, layer: int) -> None:
        """Record that a layer of an unfinished transfer has arrived."""
        self._arrived.setdefault(transfer_id, []).append(layer)
        self._schedule()

    def note_end(self, report: TransferReport) -> None:
        """Note the end of a transfer, which includes its layers."""
        self._arrived.pop(report.transfer_id, None)
        self._ended.append(report)
        self._schedule()

    def note_overdue(self, report: TransferReport) -> None:
        """Note the early end of a fetch; ``note_end`` follows."""
        self._overdue.append(report)
        self._schedule()

    def note_step(self) -> None:
        """Note that a step has finished."""
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the message now."""
        self._scheduled = False
        if not self.generation:
            return
        self._send(
            Reports(
                generation=self.generation,
                arrived=list(self._arrived.items()),
                ended=self._ended,
                finished_step=self._finished_step(),
                overdue=self._overdue,
            )
        )
        self._arrived, self._ended, self._overdue = {}, [], []
