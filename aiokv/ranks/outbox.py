"""Outbox: what a rank has to tell, one message a pass of its loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.ranks.messages import Reports

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.plan import TransferReport


class Outbox:
    """Merges what happens in a pass.

    Args:
        say: sends a message.

    Attributes:
        generation: 0 while none runs: nothing is reported then.
        finished_step: this step and all before it are over.
    """

    def __init__(self, say: Callable[[Reports], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._say = say
        self._arrived: dict[int, list[int]] = {}
        self._ended: list[TransferReport] = []
        self._scheduled = False
        self.generation = 0
        self.finished_step = 0

    def begin(self, generation: int) -> None:
        """Forget what belongs to an earlier generation; 0 for the time between two."""
        self.generation = generation
        self._arrived, self._ended = {}, []

    def note_layer(self, transfer_id: int, layer: int) -> None:
        """A layer has arrived of a transfer that goes on."""
        self._arrived.setdefault(transfer_id, []).append(layer)
        self._schedule()

    def note_end(self, report: TransferReport) -> None:
        """A transfer has ended, which says more than its layers."""
        self._arrived.pop(report.transfer_id, None)
        self._ended.append(report)
        self._schedule()

    def note_step(self, step: int) -> None:
        """A step is over."""
        self.finished_step = max(self.finished_step, step)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Say it now."""
        self._scheduled = False
        if not self.generation:
            return
        try:
            self._say(
                Reports(
                    generation=self.generation,
                    arrived=list(self._arrived.items()),
                    ended=self._ended,
                    finished_step=self.finished_step,
                )
            )
            self._arrived, self._ended = {}, []
        except Exception:
            raise
        except BaseException:
            self._schedule()  # an interrupt: the manager ignores what it gets twice
            raise
