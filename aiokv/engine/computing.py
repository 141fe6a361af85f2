"""Compute in flight: blocks stay with the batches that the model computes with."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from aiokv.errors import ClosedError, LeaseError, UsageError
from aiokv.observe.logs import Log
from aiokv.worker.device.base import as_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from types import TracebackType

    from aiokv.engine.parts import Parts
    from aiokv.lease import Lease
    from aiokv.worker.device.base import Event

T = TypeVar("T")

log = Log(__name__)

_BLOCK: Final = object()  # stands for the `with` block of a batch
_THREAD_HINT: Final = "await batch.run(function, ...), or pass the executor's own future"


class ComputeBatch:
    """The leases that a batch of the model computes with; see ``CacheEngine.computing``.

    A batch ends when its ``with`` block has ended and everything that ``run`` and ``ends_with``
    were given is done. A lease that is released, cancelled, preempted, truncated or collected
    before that gives its blocks back when the batch ends, and not earlier: no other request gets a
    block that a thread or a stream may still write. Without ``ends_with(event)``, on a device that
    computes in a stream, the work belongs to the step that is open when the batch ends.
    """

    __slots__ = ("_batch_id", "_computing", "_event", "_ids", "_in_block", "_task", "_unended")

    def __init__(self, computing: Computing, lease_ids: Callable[[], list[int]]) -> None:
        self._computing = computing
        self._ids: Callable[[], list[int]] | None = lease_ids
        self._batch_id = 0  # until the block begins
        self._in_block = False
        self._event = False  # ends with an event: it does not belong to the open step
        self._unended: set[object] = set()  # things to wait for: the `with` block, work, events
        self._task: asyncio.Task[Any] | None = None

    @property
    def done(self) -> bool:
        """True when the ``with`` block, all work and all events have ended."""
        return self._batch_id > 0 and not self._unended

    def __enter__(self) -> Self:
        self._computing.check_loop()
        if self._ids is None:
            raise UsageError("the compute batch was entered already; it can be entered once")
        self._batch_id = self._computing.begin(self, self._ids())
        self._ids = None  # a lease without another reference may be collected meanwhile
        self._task = asyncio.current_task()
        self._in_block = True
        self._unended.add(_BLOCK)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._in_block = False
        self._ended(_BLOCK)

    async def run(
        self, function: Callable[..., T], /, *args: Any, executor: Executor | None = None
    ) -> T:
        """Run ``function(*args)`` in a thread; the batch does not end before it has returned.

        Args:
            function: computes with the leases of the batch; gets the caller's context variables.
            args: its arguments.
            executor: a ``ThreadPoolExecutor``; the loop's default executor without one.

        Returns:
            What the function returns; what it raises is raised here.

        Raises:
            UsageError: the ``with`` block has not begun, or has ended.

        Cancellation: the thread goes on, and the batch ends when it has returned. What it raises
        then is logged.
        """
        self._check_in_block()
        context = contextvars.copy_context()
        work = self._computing.loop.run_in_executor(executor, context.run, function, *args)
        self._unended.add(work)
        work.add_done_callback(self._ended)
        # No other code has this future, and the shield keeps it from being cancelled: so it is done
        # when the thread has returned.
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_failure)  # the caller has gone
            raise

    def ends_with(self, work: Event | ThreadFuture[Any]) -> None:
        """Let the batch end no earlier than ``work``; may be called several times.

        Args:
            work: an event that was recorded on the compute stream behind the batch's work, or a
                ``concurrent.futures.Future``, as ``executor.submit`` returns. Not a future or
                task of asyncio: that is done as soon as it is cancelled, though its thread goes on.

        Raises:
            UsageError: the ``with`` block has not begun, or has ended; or ``work`` is neither.
                Nothing changed.
        """
        self._check_in_block()
        if isinstance(work, ThreadFuture):
            self._unended.add(work)
            work.add_done_callback(self._tell_loop)
            return
        _refuse_untruthful(work)
        event = as_event("work", work)
        if event is None:
            raise UsageError("work is None; it must be an event or a future", hint=_THREAD_HINT)
        self._computing.worker.check_event(event)
        watched = object()  # the same event may be named twice
        self._unended.add(watched)
        self._event = True
        self._computing.poller.watch(event, self, partial(self._event_ended, watched))

    def is_in_block_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether ``task`` has entered the ``with`` block, which has not ended."""
        return self._in_block and self._task is task

    def _check_in_block(self) -> None:
        self._computing.check_loop()
        if not self._in_block:
            raise UsageError("the compute batch is not inside its `with` block")

    def _tell_loop(self, work: ThreadFuture[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the engine with it
            self._computing.loop.call_soon_threadsafe(self._ended, work)

    def _event_ended(self, watched: object, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, ClosedError):  # the poller's, at its end
            self._computing.fail(error)
        self._ended(watched)

    def _ended(self, work: object) -> None:
        """Idempotent, as the poller demands: it repeats a callback that an interrupt has ended."""
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


def _refuse_untruthful(work: object) -> None:
    if isinstance(work, asyncio.Future):
        raise UsageError(
            f"a batch cannot end with a {type(work).__name__} of asyncio: it is done when it is "
            "cancelled, though its thread goes on",
            hint=_THREAD_HINT,
        )


class Computing:
    """The batches of one engine that have not ended.

    Args:
        on_failure: called when the device cannot tell whether the work of a batch is over.

    Attributes:
        worker: checks events.
        poller: watches the events of batches.
    """

    def __init__(self, parts: Parts, on_failure: Callable[[BaseException], None]) -> None:
        self.worker = parts.worker
        self.poller = parts.poller
        self._lifetime = parts.lifetime
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._on_failure = on_failure
        self._batches: dict[int, ComputeBatch] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False  # nothing is given back any more

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The engine's loop."""
        return self._lifetime.loop

    def check_loop(self) -> None:
        """See ``Lifetime.check_loop``."""
        self._lifetime.check_loop()

    def begin(self, batch: ComputeBatch, lease_ids: Sequence[int]) -> int:
        """Begin a batch and return its number.

        Raises:
            LeaseError: a lease is not allocated, is being swapped, or is listed twice. Nothing
                changed.
        """
        batch_id = self._dispatcher.apply(self._scheduler.begin_batch(lease_ids))
        self._batches[batch_id] = batch
        return batch_id

    def fail(self, error: BaseException) -> None:
        """Break the engine: the device cannot tell whether the work of a batch is over."""
        self._on_failure(error)

    def end(self, batch_id: int, *, in_open_step: bool) -> None:
        """End a batch: its ``with`` block, work and events have ended."""
        del self._batches[batch_id]
        if self._closed:
            return
        self._dispatcher.apply(self._scheduler.end_batch(batch_id, in_open_step=in_open_step))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_ended(self, lease: Lease) -> None:
        """Wait until no batch computes with the lease.

        Raises:
            LeaseError: the calling task is inside the block of such a batch, which cannot end then.
            ClosedError: the engine closed.

        Cancellation: nothing changed.
        """
        while batch_ids := self._scheduler.read.batches(lease.live_id()):
            task = asyncio.current_task()
            for batch_id in batch_ids:
                if self._batches[batch_id].is_in_block_of(task):
                    raise LeaseError(
                        f"{lease!r} cannot be swapped inside the block of "
                        f"{self._batches[batch_id]!r}, which computes with it",
                        hint="let the `with` block end first",
                    )
            waiter: asyncio.Future[None] = self._lifetime.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def close(self) -> None:
        """Stop giving blocks back, and fail the coroutines that wait: the engine is closed."""
        self.stop()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ClosedError("the engine closed while a batch was in flight"))

    def stop(self) -> None:
        """Stop giving blocks back; no callback of the loop runs any more."""
        self._closed = True
