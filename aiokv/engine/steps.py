"""Steps: closing the model's steps, and their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.worker.device.base import Event


class Steps:
    """The numbers are the scheduler's; the worker has the events."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._open_step = parts.open_step

    def close(self, event: Event | None) -> int:
        """Close the open step, and return its number; see ``CacheEngine.step``.

        Raises:
            UsageError: the worker cannot wait for such an event. The step stays open.
        """
        self._worker.check_event(event)
        self._worker.close_step(self._scheduler.read.next_step, event)
        self._open_step.note_closer()
        return self._dispatcher.apply(self._scheduler.close_step())

    def finish(self, step: int) -> None:
        """Account for the end of a step, and of all before it."""
        self._dispatcher.apply(self._scheduler.finish_step(step))
