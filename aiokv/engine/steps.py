"""Steps: closes the steps of the model, and accounts for their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.logs import DEBUG, Log

if TYPE_CHECKING:
    from aiokv.engine.parts import Parts
    from aiokv.worker.device.base import Event

log = Log(__name__)


class Steps:
    """Steps of the model: the scheduler counts them, the worker holds their events."""

    def __init__(self, parts: Parts) -> None:
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._open_step = parts.open_step
        self._times = parts.times
        self._evicted_device_blocks = 0  # count at the last log line
        self._evicted_host_blocks = 0

    def close(self, event: Event | None) -> int:
        """Close the open step, and return its number; see ``CacheEngine.step``.

        Raises:
            UsageError: the worker cannot wait for an event of this type. The step stays open.
            DeviceError: the event has failed. The next call ends this step, too.
        """
        self._worker.steps.check_event(event)
        # The scheduler goes first. If it raises, blocks of the next step must not count as blocks
        # of this step, whose event may be done. The worker closes both steps with the next event.
        step = self._dispatcher.apply(self._scheduler.close_step())
        self._open_step.note_closer()
        self._times.step_closes(step)
        self._worker.steps.close(step, event)
        if log.is_on(DEBUG):
            self._log_evictions()
        return step

    def _log_evictions(self) -> None:
        """Log the blocks that were evicted since the last line."""
        counts = self._scheduler.read.statistics()
        device = counts.attention.device.evicted_blocks - self._evicted_device_blocks
        host = counts.attention.host.evicted_blocks - self._evicted_host_blocks
        self._evicted_device_blocks = counts.attention.device.evicted_blocks
        self._evicted_host_blocks = counts.attention.host.evicted_blocks
        if device or host:
            log.debug("blocks.evicted", device_blocks=device, host_blocks=host)

    def finish(self, step: int) -> None:
        """Account for the end of a step and of all earlier steps."""
        self._times.step_finished(step)
        self._dispatcher.apply(self._scheduler.finish_step(step))
