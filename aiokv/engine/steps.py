"""Steps of the model: which of them the device has finished."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.worker.controller import CacheController
    from aiokv.worker.device.base import Event
    from aiokv.worker.poller import EventPoller


class Steps:
    """Numbers the steps, and tells scheduler and worker when one is over.

    Args:
        tracked: False on a device that computes before it returns: what is committed there is
            computed, and ``open`` is 0.
        on_finished: called after a step's ids may be used again.
        on_broken: called with the error of a step's event.
    """

    def __init__(
        self,
        core: Core,
        controller: CacheController,
        poller: EventPoller,
        *,
        tracked: bool,
        on_finished: Callable[[], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._controller = controller
        self._poller = poller
        self._on_finished = on_finished
        self._on_broken = on_broken
        self._tracked = tracked
        self._next = 1
        self._unfinished: deque[int] = deque()  # closed, oldest first

    @property
    def open(self) -> int:
        """What commit and release note for the blocks they touch."""
        return self._next if self._tracked else 0

    def close(self, event: Event | None) -> int:
        """Close the open step; events of later steps lie behind those of earlier ones."""
        step = self._next
        self._next += 1
        self._controller.close_step(step, event)
        self._unfinished.append(step)
        if event is None or event.done:
            self._finish(step)
        else:
            self._poller.watch(event, "steps", lambda error: self._on_event(step, error))
        return step

    def _on_event(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self._finish(step)
        elif not isinstance(error, ClosedError):
            self._on_broken(error)

    def _finish(self, step: int) -> None:
        while self._unfinished and self._unfinished[0] <= step:
            self._unfinished.popleft()
        self._core.finish_step(step)
        self._on_finished()
