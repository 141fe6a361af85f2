"""Batches in flight: their blocks are not reused while the model computes with them."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from aiokv.base.logs import Log
from aiokv.errors import ClosedError, LeaseError, UsageError
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from aiokv.base.types import LeaseIds
    from aiokv.engine.batch import Batch, Rows
    from aiokv.engine.expiries import Expiries
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.parts import Parts
    from aiokv.worker.device.base import Event

T = TypeVar("T")
LeaseT = TypeVar("LeaseT")

log = Log(__name__)

_BLOCK: Final = object()  # key of the `with` block of a batch in `_unended`
_THREAD_HINT: Final = "await batch.run(function, ...), or pass the executor's own future"


class ComputeBatch(Generic[LeaseT]):
    """Batch of leases that the model computes with; see ``CacheEngine.computing``.

    The batch ends when the ``with`` block, all calls of ``run`` and all work passed to
    ``ends_with`` have ended. When a lease is released, cancelled, preempted, truncated or
    garbage-collected earlier, the engine reuses its blocks only after the batch has ended: no other
    request gets a block that a thread or a stream may still write. On a device that computes in a
    stream, the work of a batch without ``ends_with(event)`` belongs to the step that is open when
    the batch ends.

    Attributes:
        batch: the ``Batch`` whose leases the model computes with; None for a list of leases.
        rows: rows of ``batch`` when the ``with`` block began; None before.
    """

    __slots__ = (
        "_batch_id",
        "_computing",
        "_event",
        "_ids",
        "_in_block",
        "_task",
        "_unended",
        "batch",
        "rows",
    )

    def __init__(
        self,
        computing: Computing,
        lease_ids: Callable[[], LeaseIds],
        batch: Batch[LeaseT] | None = None,
    ) -> None:
        self.batch = batch
        self.rows: Rows[LeaseT] | None = None
        self._computing = computing
        self._ids: Callable[[], LeaseIds] | None = lease_ids
        self._batch_id = 0  # 0 until the `with` block begins
        self._in_block = False
        self._event = False  # True if it ends with an event and is not part of the open step
        self._unended: set[object] = set()  # the `with` block, work and events to wait for
        self._task: asyncio.Task[Any] | None = None  # inside the `with` block

    @property
    def done(self) -> bool:
        """True if the ``with`` block, all work and all events have ended."""
        return self._batch_id > 0 and not self._unended

    def __enter__(self) -> Self:
        self._computing.check_loop()
        if self._ids is None:
            raise UsageError(
                "this ComputeBatch was entered already; it can be entered once",
                hint="call engine.computing(leases) for each batch",
            )
        self._batch_id = self._computing.begin(self, self._ids())
        self._ids = None  # drop the leases, so that the garbage collector can collect them
        if self.batch is not None:
            self.rows = self.batch.keep_rows()
        self._task = asyncio.current_task()
        self._in_block = True
        self._unended.add(_BLOCK)
        return self

    def __exit__(self, *exc: object) -> None:
        self._in_block = False
        # A future of the user may keep this batch, and the task's locals have leases.
        self._task = None
        self._ended(_BLOCK)

    async def run(
        self, function: Callable[..., T], /, *args: Any, executor: Executor | None = None
    ) -> T:
        """Run ``function(*args)`` in a thread; the batch does not end before it has returned.

        Args:
            function: computes with the leases of the batch; runs with the caller's context
                variables.
            args: positional arguments of the function.
            executor: a ``ThreadPoolExecutor``; None for the default executor of the loop.

        Returns:
            The result of the function.

        Raises:
            UsageError: the ``with`` block has not begun, or has ended.
            Exception: any exception of the function.

        Cancellation: the thread continues, and the batch ends after the function has returned. The
        engine logs an exception that the function raises then.
        """
        self._check_in_block()
        context = contextvars.copy_context()
        work = self._computing.loop.run_in_executor(executor, context.run, function, *args)
        self._unended.add(work)
        work.add_done_callback(self._ended)
        # No other code has this future, and shield() protects it from cancellation. So the future
        # is done only when the thread has returned.
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_failure)  # no caller receives the exception
            raise

    def ends_with(self, work: Event | ThreadFuture[Any]) -> None:
        """Let the batch end no earlier than ``work``; may be called several times.

        Args:
            work: an event that was recorded on the compute stream after the work of the batch, or a
                ``concurrent.futures.Future`` from ``executor.submit``. Futures and tasks of asyncio
                are refused: a cancelled one is done at once, although its thread continues.

        Raises:
            UsageError: the ``with`` block has not begun, or has ended; or ``work`` has another
                type. Nothing changed.
        """
        self._check_in_block()
        if isinstance(work, ThreadFuture):
            self._unended.add(work)
            work.add_done_callback(self._tell_loop)
            return
        _refuse_asyncio_future(work)
        event = as_event("work", work)
        if event is None:
            raise UsageError(
                "ends_with: work is None; it must be an event or a concurrent.futures.Future",
                hint=_THREAD_HINT,
            )
        self._computing.worker.steps.check_event(event)
        watched = object()  # the same event may be passed twice
        self._unended.add(watched)
        self._event = True
        self._computing.poller.watch(event, self, partial(self._event_ended, watched))

    def is_in_block_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if ``task`` has entered the ``with`` block and the block has not ended."""
        return task is not None and self._task is task

    def _check_in_block(self) -> None:
        self._computing.check_loop()
        if not self._in_block:
            raise UsageError("this ComputeBatch can only be used inside its `with` block")

    def _tell_loop(self, work: ThreadFuture[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, so the engine is closed, too
            self._computing.loop.call_soon_threadsafe(self._ended, work)

    def _event_ended(self, watched: object, error: BaseException | None) -> None:
        # The poller ends its watches with ClosedError when it is closed.
        if error is not None and not isinstance(error, ClosedError):
            self._computing.fail(error)
        self._ended(watched)

    def _ended(self, work: object) -> None:
        """Note the end of some work. Idempotent."""
        if work not in self._unended:
            return
        self._unended.remove(work)
        if not self._unended:
            self._computing.end(self._batch_id, in_open_step=not self._event)

    def __repr__(self) -> str:
        if not self._batch_id:
            return "<ComputeBatch, not entered>"
        state = "done" if self.done else "in its block" if self._in_block else "computing"
        return f"<ComputeBatch {self._batch_id}, {state}>"


def _log_failure(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.error("batch.failed", reason=repr(error))


def _refuse_asyncio_future(work: object) -> None:
    if isinstance(work, asyncio.Future):
        raise UsageError(
            f"ends_with: work is an asyncio {type(work).__name__}, which is done when it is "
            "cancelled, although its thread continues",
            hint=_THREAD_HINT,
        )


class Computing:
    """Batches of one engine that have not ended.

    Args:
        parts: parts of the engine.
        expiries: timers of leases, which a batch stops.
        on_failure: called with the error when an event of a batch has failed.
        on_end: called when a batch has ended. Idempotent.

    Attributes:
        worker: checks events.
        poller: watches the events of batches.
    """

    def __init__(
        self,
        parts: Parts,
        expiries: Expiries,
        on_failure: Callable[[BaseException], None],
        on_end: Callable[[], None],
    ) -> None:
        self.worker = parts.worker
        self.poller = parts.poller
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._expiries = expiries
        self._on_failure = on_failure
        self._on_end = on_end
        self._read = parts.scheduler.read
        self._transfers = parts.transfers
        self._times = parts.times
        self._observers = parts.observers
        self._batches: dict[int, ComputeBatch[Any]] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False  # True: the end of a batch frees no blocks

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the engine."""
        return self._lifetime.loop

    def check_loop(self) -> None:
        """See ``Lifetime.check_loop``."""
        self._lifetime.check_loop()

    def begin(self, batch: ComputeBatch[Any], lease_ids: LeaseIds) -> int:
        """Begin a batch and return its number.

        Raises:
            LeaseError: a lease is not granted, is being swapped, or is listed twice. Nothing
                changed.
        """
        batch_id = self._dispatcher.apply(self._scheduler.begin_batch(lease_ids))
        self._batches[batch_id] = batch
        if self._expiries.timers:
            self._expiries.stop_all(lease_ids)
        waits = self._transfers.are_in_flight and self._read.has_onloads(lease_ids)
        self._times.batch_begins(batch_id, waits=waits)
        if self._observers.active:
            self._observers.batch_began(batch_id, len(lease_ids))
        return batch_id

    def fail(self, error: BaseException) -> None:
        """Break the engine: an event of a batch failed, so the end of its work is unknown."""
        self._on_failure(error)

    def end(self, batch_id: int, *, in_open_step: bool) -> None:
        """End a batch whose ``with`` block, work and events have ended. Idempotent."""
        self._times.batch_ends(batch_id)
        if not self._closed:
            self._dispatcher.apply(self._scheduler.end_batch(batch_id, in_open_step=in_open_step))
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._batches.pop(batch_id, None)
        if self._observers.active:
            self._observers.batch_ended(batch_id)
        if not self._closed:
            self._on_end()

    async def wait_ended(self, record: LeaseRecord) -> None:
        """Wait until no batch computes with the lease.

        Raises:
            LeaseError: the calling task is inside the ``with`` block of such a batch, so the batch
                cannot end.
            ClosedError: the engine was closed.

        Cancellation: nothing changed.
        """
        while batch_ids := self._scheduler.read.batches(record.live_id()):
            task = asyncio.current_task()
            for batch_id in batch_ids:
                if self._batches[batch_id].is_in_block_of(task):
                    raise LeaseError(
                        f"preempt: {record!r} cannot be swapped inside the `with` block of "
                        f"{self._batches[batch_id]!r}, which computes with the lease",
                        hint="call preempt after the `with` block",
                    )
            waiter: asyncio.Future[None] = self._lifetime.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def close(self) -> None:
        """Free no more blocks, and fail the waiting coroutines: the engine is closed."""
        self.stop()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(
                    ClosedError("preempt: the engine was closed while a batch was in flight")
                )

    def stop(self) -> None:
        """Free no more blocks: no callback of the loop runs any more."""
        self._closed = True
