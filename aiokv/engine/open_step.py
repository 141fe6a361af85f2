"""OpenStep: detects transfers, and tasks, that wait for a step which stays open."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.logs import Log
from aiokv.errors import UsageError
from aiokv.scheduler.reader import STEP_HINT

if TYPE_CHECKING:
    from aiokv.engine.lifetime import Lifetime
    from aiokv.scheduler.reader import CacheReader
    from aiokv.worker.base import Worker

log = Log(__name__)

WARN_SECONDS: Final = 5.0


class OpenStep:
    """Warns about a step that stays open while transfers wait for its end.

    The worker cannot copy blocks that an open step uses. A serving loop that does not close its
    last step would wait forever for such a copy. A timer runs only while a transfer waits.
    """

    def __init__(self, lifetime: Lifetime, read: CacheReader, worker: Worker) -> None:
        self._lifetime = lifetime
        self._read = read
        self._worker = worker
        # Tasks that have closed a step.
        self._closers: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._closed_in_callback = False
        self._timer: asyncio.TimerHandle | None = None
        self._step = 0  # the step that was open when the timer was set
        self._warned_of = 0

    def note_closer(self) -> None:
        """Note that the current task has closed a step."""
        task = asyncio.current_task()
        if task is None:
            self._closed_in_callback = True
        else:
            self._closers.add(task)

    def check_wait(self, step: int, awaited: str = "layers") -> None:
        """Raise if the calling task would wait for a step that only this task closes.

        Args:
            step: number of the step that the awaited transfer waits for.
            awaited: names what the task waits for, in the plural.

        Raises:
            UsageError: the step is open, and the calling task is the only running task that has
                closed a step.
        """
        if step != self._read.open_step or self._closed_in_callback:
            return
        if {task for task in self._closers if not task.done()} == {asyncio.current_task()}:
            raise UsageError(
                f"the {awaited} wait for the end of step {step}, which only the calling task "
                "closes: waiting would never end",
                hint=f"call engine.step(event) before waiting for the {awaited}",
            )

    def note_transfer(self, after_step: int) -> None:
        """Note a submitted transfer that waits for the step ``after_step``; 0 for no step."""
        if after_step and after_step == self._read.open_step and self._timer is None:
            self._step = after_step
            self._timer = self._lifetime.loop.call_later(WARN_SECONDS, self.look)

    def look(self) -> None:
        """Warn, once per step, if the step is still open after ``WARN_SECONDS``."""
        self.stop()
        held = self._worker.statistics().held
        if held and self._read.open_step != self._step:
            self.note_transfer(self._read.open_step)
        elif held and self._step != self._warned_of:
            self._warned_of = self._step
            log.warning(
                "step.left_open", step=self._step, waiting_transfers=held, hint=STEP_HINT,
                open_seconds=WARN_SECONDS,
            )  # fmt: skip

    def explain(self) -> str:
        """Describe the step that transfers wait for; empty when no transfer waits for a step."""
        held = self._worker.statistics().held
        if not held:
            return ""
        return f"{held} transfers wait for the end of step {self._read.open_step}, which is open"

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
