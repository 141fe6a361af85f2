"""Warnings about transfers that wait for a step that stays open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiokv.observe.logs import Log

if TYPE_CHECKING:
    import asyncio

    from aiokv.engine.steps import Steps
    from aiokv.worker.base import Worker

log = Log(__name__)

WARN_SECONDS: Final = 5.0
_ADVICE: Final = "call engine.step(event) behind the last work that was submitted"


class OpenStepWatch:
    """Blocks that an open step uses cannot be copied, and so not be saved, swapped or settled.

    A loop that ends its work without closing the step waits for ever; this names the reason. There
    is a timer only while a transfer waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: Steps, worker: Worker) -> None:
        self._loop = loop
        self._steps = steps
        self._worker = worker
        self._timer: asyncio.TimerHandle | None = None
        self._step = 0  # open when the timer was set
        self._warned_of = 0

    def note(self, after_step: int) -> None:
        """A transfer was submitted that waits for ``after_step``; 0 for none."""
        if after_step and after_step == self._steps.open and self._timer is None:
            self._step = after_step
            self._timer = self._loop.call_later(WARN_SECONDS, self.look)

    def look(self) -> None:
        """The time is over: warn, once a step, if it is still open."""
        self.stop()
        held = self._worker.statistics().held
        if held and self._steps.open != self._step:
            self.note(self._steps.open)
        elif held and self._step != self._warned_of:
            self._warned_of = self._step
            log.warning(
                "step.left_open", step=self._step, waiting_transfers=held, hint=_ADVICE,
                open_seconds=WARN_SECONDS,
            )  # fmt: skip

    def explain(self) -> str:
        """For messages of what has waited too long; empty when no transfer waits for a step."""
        held = self._worker.statistics().held
        if not held:
            return ""
        return f"{held} transfers wait for the end of step {self._steps.open}, which is open"

    def advice(self) -> str:
        return _ADVICE

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
