"""Steps: when the open step of the engine ends, whose blocks transfers may read and write then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.sync import Calls, SyncEngine


class Steps:
    """The open step of one scheduler. The caller holds the lock of :class:`RequestBlocks`.

    Args:
        engine: the cache.
        step_event: returns an event behind all work that the runner has submitted, or None when all
            of it has finished; None with ranks, which close steps themselves.

    Attributes:
        last: number of the last closed step.
        has_changed: True if blocks were taken since the last step was closed.
        may_wait: True if the step may stay open until the next batch.
        is_held: True if only the end of a ``schedule()`` may close the open step.
    """

    def __init__(self, engine: SyncEngine, step_event: Callable[[], Any] | None) -> None:
        self._engine = engine
        self._step_event = step_event
        self.last = 0
        self.has_changed = False
        self.may_wait = False
        self.is_held = False

    def record_close(self, calls: Calls) -> None:
        """Close the step: transfers may write the blocks that were given back in it.

        Does nothing while the step is held.
        """
        self.has_changed = self.is_held
        if not self.is_held:
            calls.add(self._close)

    def record_end(self, calls: Calls) -> None:
        """Close the step at the end of a ``schedule()``."""
        self.has_changed = self.is_held  # the next step has to be closed, too
        self.is_held = False
        calls.add(self._close)

    def close(self) -> None:
        """Close the step, unless it is held. On the engine's loop."""
        if not self.is_held:
            self._close()

    def _close(self) -> None:
        event = None if self._step_event is None else self._step_event()
        self.last = self._engine.cache.step(event)
