"""Steps: closes the steps of the model, and accounts for their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.worker.device.base import Event


class Steps:
    """Steps of the model: the scheduler counts them, the worker holds their events."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._open_step = parts.open_step

    def close(self, event: Event | None) -> int:
        """Close the open step, and return its number; see ``CacheEngine.step``.

        Raises:
            UsageError: the worker cannot wait for an event of this type. The step stays open.
        """
        self._worker.check_event(event)
        self._worker.close_step(self._scheduler.read.next_step, event)
        self._open_step.note_closer()
        return self._dispatcher.apply(self._scheduler.close_step())

    def finish(self, step: int) -> None:
        """Account for the end of a step and of all earlier steps."""
        self._dispatcher.apply(self._scheduler.finish_step(step))
