"""Steps of the model on one side of a worker: their numbers, their events, and what follows them.

A step is open until it is closed, and has finished when its event is done.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.plan import CLONE
from aiokv.errors import ClosedError, DeviceError, UsageError
from aiokv.worker.blocks import clone_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.base.plan import TransferPlan
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.device.base import Device, Event
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.poller import EventPoller


class WorkerStepClock:
    """Numbers of the steps that were closed, and of those that have finished.

    Attributes:
        closed: newest closed step; 0 before the first.
        finished: newest step that has finished, with all steps before it.
    """

    __slots__ = ("closed", "finished")

    def __init__(self) -> None:
        self.closed = 0
        self.finished = 0

    def is_open(self, step: int) -> bool:
        """Return True while work of the step may not have been submitted yet."""
        return step > self.closed

    def check(self, step: int) -> None:
        """Check that the step is open.

        Raises:
            UsageError: the step is closed already.
        """
        if not self.is_open(step):
            raise UsageError(
                f"step {step} is closed already; the last closed step is {self.closed}"
            )

    def close(self, step: int) -> None:
        """Close all steps up to ``step``.

        Raises:
            UsageError: the step is closed already. Nothing changed.
        """
        self.check(step)
        self.closed = step

    def finish(self, step: int) -> None:
        """Note that all steps up to ``step`` have finished. Idempotent."""
        self.finished = max(self.finished, step)


class StepEvents:
    """Events of closed steps that have not finished."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Event | None]] = deque()  # by step, ascending
        self._passed_step = 0  # events of this step and of earlier ones are done

    def __len__(self) -> int:
        return len(self._events)

    def add(self, step: int, event: Event | None) -> None:
        """Add the event of a step that is being closed; None if the step has finished."""
        self._events.append((step, event))
        self.drop(self._passed_step)

    def drop(self, step: int) -> None:
        """Drop the events of all steps up to ``step``, which are done."""
        while self._events and (self._events[0][0] <= step or self._events[0][1] is None):
            self._passed_step = self._events.popleft()[0]

    def event_for(self, step: int) -> Event | None:
        """Return the event that work after a closed step waits for; None when it has finished."""
        if step <= self._passed_step:
            return None
        return next((event for closed, event in self._events if closed >= step), None)


class WorkerSteps:
    """Steps of the model on the device of one worker; see :class:`aiokv.worker.base.Steps`.

    Args:
        device: computes the steps.
        memory: has the tensors.
        checksums: checksums of computed blocks; None without.

    Attributes:
        clock: numbers of the steps.
        events: events of closed steps.
    """

    def __init__(
        self, device: Device, memory: Callable[[], WorkerMemory], checksums: Checksums | None
    ) -> None:
        self.clock = WorkerStepClock()
        self.events = StepEvents()
        self._device = device
        self._memory = memory
        self._checksums = checksums
        self._uncomputed: list[NDArray[np.int32]] = []  # to record when the open step is closed
        self._poller: EventPoller | None = None
        self._on_close: Callable[[], None] = _ignore_close
        self._on_step: Callable[[int, BaseException | None], None] = _ignore_step

    def open(
        self,
        poller: EventPoller,
        on_close: Callable[[], None],
        on_step: Callable[[int, BaseException | None], None],
    ) -> None:
        """Watch events from now on.

        Args:
            poller: watches the events of the steps.
            on_close: called when steps were closed. Idempotent.
            on_step: see :meth:`Worker.open`.
        """
        self._poller, self._on_close, self._on_step = poller, on_close, on_step

    def check_event(self, event: Event | None) -> None:
        """Raise unless ``close`` can take the event. Cheap; changes nothing.

        Raises:
            UsageError: ``event`` is not an event, is of another device, or was never recorded.
        """
        if event is not None:
            self._device.check_event(event)

    def close(self, step: int, event: Event | None) -> None:
        """Close all steps up to ``step``; see :meth:`aiokv.worker.base.Steps.close`.

        Raises:
            ClosedError: the worker is not open.
        """
        poller = self.open_poller()
        self.check_event(event)
        self.clock.check(step)
        self._record_computed(event)
        self.clock.close(step)
        self.events.add(step, event)
        self._on_close()
        if event is None:
            self._finish(step)
        else:
            poller.watch(event, "steps", partial(self._event_done, step))

    def open_poller(self) -> EventPoller:
        """Return the poller of a worker that is open.

        Raises:
            ClosedError: the worker is not open, or its poller is closed.
        """
        if self._poller is None:
            raise ClosedError("the cache controller is not open")
        if self._poller.closed:
            raise ClosedError("the cache controller is closed")
        return self._poller

    def _event_done(self, step: int, error: BaseException | None) -> None:
        if error is None:
            self.events.drop(step)
            self._finish(step)
        elif not isinstance(error, ClosedError):  # the poller was closed
            self._on_step(step, error)

    def _finish(self, step: int) -> None:
        self.clock.finish(step)
        self._on_step(step, None)

    def clone(self, plan: TransferPlan, stream: Any = None) -> None:
        """Copy blocks or state slots within the device; see :meth:`Steps.clone`."""
        regions = self._memory().regions
        if plan.route != CLONE or plan.group not in (ATTENTION, STATE):
            raise UsageError(
                f"clone: the route is {plan.route}, the group is {plan.group!r}; the route must be "
                f"{CLONE}, the group {ATTENTION!r} or {STATE!r}"
            )
        pieces = regions.state_pieces if plan.group == STATE else regions.pieces()
        clone_rows(list(pieces), plan.source_ids, plan.target_ids, stream)

    def record_checksums(self, block_ids: NDArray[np.int32], step: int) -> None:
        """Record the bytes of computed blocks; see :meth:`Steps.record_checksums`."""
        if self._checksums is None:
            raise UsageError(
                "record_checksums: the worker was made without checksums",
                hint="set CacheConfig.verify to 'checksum'",
            )
        if self.clock.is_open(step):
            self._uncomputed.append(block_ids)
        else:
            self._checksums.record(block_ids)

    def _record_computed(self, event: Event | None) -> None:
        """Read the blocks of the step that is being closed, when they have been computed."""
        has_failed = getattr(self._device, "failure", None) is not None
        if self._checksums is None or not self._uncomputed or has_failed:
            return
        if event is not None:
            try:
                event.synchronize()
            except Exception as error:  # CuPy's exception class is only available with a driver
                raise DeviceError(f"close_step: the event of the step failed: {error}") from error
        self._checksums.record(np.concatenate(self._uncomputed))
        self._uncomputed.clear()


def _ignore_close() -> None:
    """Take the place of ``on_close`` before ``open``."""


def _ignore_step(step: int, error: BaseException | None) -> None:
    """Take the place of ``on_step`` before ``open``."""
