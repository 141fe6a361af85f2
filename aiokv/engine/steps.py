"""Steps of the model: which of them the device has finished."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from aiokv.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.worker.base import Worker
    from aiokv.worker.device.base import Event


class Steps:
    """Numbers the steps, and tells scheduler and worker when one is over.

    Args:
        tracked: False on a device that computes before it returns: what is committed there is
            computed, and ``open`` is 0.
        on_finished: called after a step's ids may be used again.
        on_broken: called with the error of a step's event.

    Attributes:
        next: the number that the step gets which is closed next.
    """

    def __init__(
        self,
        core: Core,
        controller: Worker,
        *,
        tracked: bool,
        on_finished: Callable[[], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._controller = controller
        self._on_finished = on_finished
        self._on_broken = on_broken
        self._tracked = tracked
        self.next = 1
        self._unfinished: deque[int] = deque()  # closed, oldest first
        self._closers: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # of any step
        self._closed_in_callback = False

    @property
    def open(self) -> int:
        """The step that commit and release note for their blocks; 0 when steps do not matter."""
        return self.next if self._tracked else 0

    @property
    def all_finished(self) -> bool:
        """True when every closed step has finished, and the open one uses no blocks."""
        return not self._unfinished and not self._core.unfinished_step()

    def explain(self) -> str:
        """Name the step that ``all_finished`` waits for; empty when there is none."""
        if self._core.unfinished_step() >= self.next:
            return f"step {self.next} is open and uses blocks; close it with engine.step(event)"
        if self._unfinished:
            return f"step {self._unfinished[-1]} is closed, but its event is not done"
        return ""

    def close(self, event: Event | None) -> int:
        """Close the open step; events of later steps lie behind those of earlier ones.

        Raises:
            UsageError: the worker cannot wait for such an event. The step stays open.
        """
        step = self.next
        self.next += 1
        self._unfinished.append(step)
        try:
            self._controller.close_step(step, event)
        except (UsageError, DeviceError):
            self._unfinished.remove(step)
            self.next = step
            raise
        self._core.close_step(step)
        task = asyncio.current_task()
        if task is None:
            self._closed_in_callback = True
        else:
            self._closers.add(task)
        return step

    def check_wait(self, step: int) -> None:
        """Raise when the calling task would wait for a step that only this task closes.

        Args:
            step: the step that the awaited transfer waits for.

        Raises:
            UsageError: the step is open, and of all that have closed a step only the calling task
                is left.
        """
        if step != self.open or self._closed_in_callback:
            return
        if {task for task in self._closers if not task.done()} == {asyncio.current_task()}:
            raise UsageError(
                f"waiting for layers that wait for the end of step {step}, which this task itself "
                "has to close",
                hint="call engine.step(event) before you wait",
            )

    def on_step(self, step: int, error: BaseException | None) -> None:
        """The worker says that a step is over, and all before it."""
        if error is not None:
            self._on_broken(error)
            return
        while self._unfinished and self._unfinished[0] <= step:
            self._unfinished.popleft()
        self._core.finish_step(step)
        self._on_finished()
