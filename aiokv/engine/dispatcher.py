"""Dispatcher: the only code that applies the effects of the scheduler's transitions."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.base.plan import TransferReport
from aiokv.engine.conditions import Conditions
from aiokv.errors import BrokenEngineError
from aiokv.scheduler.effects import NO_EFFECTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.base.state_guard import StateGuard
    from aiokv.engine.lifetime import Lifetime
    from aiokv.engine.transfers import Transfers
    from aiokv.errors import AiokvError
    from aiokv.scheduler.effects import Effects, Grant, Moved
    from aiokv.scheduler.scheduler import CacheScheduler
    from aiokv.worker.base import Worker
    from aiokv.worker.poller import EventPoller

T = TypeVar("T")


class _Wait:
    """Task that waits for a grant. Its future is True once granted, False for ``take_turn``."""

    __slots__ = ("future", "on_grant")

    def __init__(self, future: asyncio.Future[bool], on_grant: Callable[[Grant], None]) -> None:
        self.future = future
        self.on_grant = on_grant


class Dispatcher:
    """Applies effects: ``value = dispatcher.apply(scheduler.commit(lease_id, num_tokens))``.

    It owns the futures of the tasks that wait for leases, keyed by lease id.

    Attributes:
        conditions: tested after each transition.
    """

    def __init__(
        self,
        scheduler: CacheScheduler,
        lifetime: Lifetime,
        guard: StateGuard,
        worker: Worker,
        poller: EventPoller,
        transfers: Transfers,
    ) -> None:
        self._scheduler = scheduler
        self._lifetime = lifetime
        self._guard = guard
        self._worker = worker
        self._poller = poller
        self._transfers = transfers
        self._waits: dict[int, _Wait] = {}  # for capacity
        self._errors: dict[int, BaseException] = {}  # by lease id; the next `granted` raises it
        self._pending_waits: dict[int, asyncio.Future[None]] = {}
        self._idle_waits: dict[int, list[asyncio.Future[None]]] = {}
        self._on_unpinned: Callable[[int, str], None] = lambda lease_id, reason: None
        self._on_moved: Callable[[Moved], None] = lambda moved: None
        self._answers: deque[Callable[[], tuple[None, Effects]]] = (
            deque()
        )  # results of cancellations
        self._advance: asyncio.Handle | None = None
        self._will_collect = False
        self._stopped = False
        self.conditions = Conditions()
        self._condition_waiters = self.conditions.waiters

    def tell_unpinned(self, callback: Callable[[int, str], None]) -> None:
        """Call ``callback(lease_id, reason)`` for each pin that ends."""
        self._on_unpinned = callback

    def on_moved(self, callback: Callable[[Moved], None]) -> None:
        """Call ``callback(moved)`` for each end of a transfer from or to a peer.

        It makes no transition.
        """
        self._on_moved = callback

    def stop(self) -> None:
        """Apply no more effects.

        This process is a fork of the process that has the worker, or the state of the engine is
        unknown.
        """
        self._stopped = True

    # --- effects --------------------------------------------------------------------------------

    def apply(self, result: tuple[T, Effects]) -> T:
        """Apply the effects of a transition, and return its value."""
        value, effects = result
        if effects is not NO_EFFECTS and not self._stopped:
            try:
                self._apply(effects)
            except BaseException as error:
                self._guard.note(error)
                raise
        if self._condition_waiters:
            self.conditions.test()
        return value

    def _apply(self, effects: Effects) -> None:
        """Apply all entries, and remove them.

        No entry makes a transition; those that follow from a cancellation are made at the end.
        """
        while True:
            if effects.has_entries:
                self._apply_entries(effects)
                effects.has_entries = False
            if effects.collect:
                self._schedule_collect()
                effects.collect = False
            if effects.advance:
                self._schedule_advance()
                effects.advance = False
            self._scheduler.applied()
            if not self._answers:
                return
            _, effects = self._answers.popleft()()

    def _apply_entries(self, effects: Effects) -> None:
        while effects.computed:
            step = self._scheduler.read.open_step
            self._worker.steps.record_checksums(effects.computed.popleft(), step)
        while effects.submit:
            self._transfers.submit(effects.submit.popleft())
        while effects.urge:
            self._transfers.raise_priority(*effects.urge.popleft())
        while effects.granted:
            self._end_wait(effects.granted.popleft())
        while effects.turns:
            self._give_turn(effects.turns.popleft())
        while effects.refused:
            self._refuse(*effects.refused.popleft())
        while effects.resumed:
            self._resume(*effects.resumed.popleft())
        while effects.unpinned:
            self._on_unpinned(*effects.unpinned.popleft())
        while effects.moved:
            self._on_moved(effects.moved.popleft())
        while effects.idle:
            self._end_idle_waits(effects.idle.popleft())
        while effects.cancel:
            self._cancel(effects.cancel.popleft())

    def _cancel(self, transfer_id: int) -> None:
        """Cancel a transfer; note the transition that follows from the worker's answer."""
        scheduler = self._scheduler
        answer = self._transfers.cancel(transfer_id)
        if answer == "at once":  # a new match of the same prompt must not join the transfer
            report = TransferReport(transfer_id=transfer_id, outcome="cancelled")
            self._answers.append(partial(scheduler.complete, report))
        elif answer == "asked":
            self._answers.append(partial(scheduler.note_cancelling, transfer_id))

    # --- transitions at the end of this pass, and in later passes -------------------------------

    def _schedule_collect(self) -> None:
        """At the end of this pass of the loop, back up all blocks committed in the pass."""
        if not self._poller.closed and not self._will_collect:
            self._poller.soon(self._collect)
            self._will_collect = True

    def _collect(self) -> None:
        self._will_collect = False
        self.apply(self._scheduler.collect_backups())
        if self._scheduler.has_stores:
            self.apply(self._scheduler.store_saver.collect())

    def _schedule_advance(self) -> None:
        if self._advance is None:
            self._advance = self._lifetime.loop.call_soon(self._run_advance)

    def _run_advance(self) -> None:
        self._advance = None
        self.apply(self._scheduler.advance())

    # --- waiting tasks --------------------------------------------------------------------------

    async def granted(self, lease_id: int, on_grant: Callable[[Grant], None]) -> bool:
        """Wait for the grant of a lease that waits for capacity.

        Args:
            lease_id: the lease.
            on_grant: called with the grant, before the task runs.

        Returns:
            True when the lease is granted; False when the caller must call ``take_turn``.

        Raises:
            AiokvError: the wait has ended without a grant.

        Cancellation: the caller must call ``CacheScheduler.stop_waiting``.
        """
        if error := self._errors.pop(lease_id, None):
            raise error
        wait = self._waits[lease_id] = _Wait(self._lifetime.loop.create_future(), on_grant)
        try:
            return await wait.future
        finally:
            del self._waits[lease_id]

    def forget_wait(self, lease_id: int) -> None:
        """Note that the task of a lease no longer waits."""
        self._errors.pop(lease_id, None)

    def _end_wait(self, grant: Grant) -> None:
        wait = self._waits.get(grant.lease_id)
        if wait is None:
            return  # the waiting task has ended, and has called stop_waiting
        try:  # a grant may come in the pass in which a deadline has cancelled the future
            wait.on_grant(grant)
        except Exception as error:  # a lease without its layers must not count as granted
            self._refuse(grant.lease_id, error)
            return
        if not wait.future.done():
            wait.future.set_result(True)

    def _give_turn(self, lease_id: int) -> None:
        wait = self._waits.get(lease_id)
        if wait is not None and not wait.future.done():
            wait.future.set_result(False)

    def _refuse(self, lease_id: int, error: BaseException) -> None:
        if isinstance(error, BrokenEngineError):
            error.__cause__ = self._lifetime.failure
        wait = self._waits.get(lease_id)
        if wait is None or wait.future.done():
            self._errors[lease_id] = error
        else:
            wait.future.set_exception(error)

    async def resumed(self, lease_id: int) -> None:
        """Wait until a lease that waits for pending blocks must call ``wait_pending`` again.

        Raises:
            LeaseError: the lease was released meanwhile.

        Cancellation: the caller must call ``CacheScheduler.stop_wait_pending``.
        """
        future: asyncio.Future[None] = self._lifetime.loop.create_future()
        self._pending_waits[lease_id] = future
        try:
            await future
        finally:
            del self._pending_waits[lease_id]

    def _resume(self, lease_id: int, error: BaseException | None) -> None:
        future = self._pending_waits.get(lease_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def idle(self, lease_id: int) -> None:
        """Wait until a lease becomes idle, or the engine is closed.

        Cancellation: nothing changed.
        """
        future: asyncio.Future[None] = self._lifetime.loop.create_future()
        waits = self._idle_waits.setdefault(lease_id, [])
        waits.append(future)
        try:
            await future
        finally:
            waits.remove(future)
            if not waits:
                self._idle_waits.pop(lease_id, None)

    def end_idle_waits(self) -> None:
        """Wake all who wait for idle leases: the worker has ended, and moves no byte any more."""
        for lease_id in list(self._idle_waits):
            self._end_idle_waits(lease_id)

    def fail_waits(self, new_error: Callable[[], AiokvError]) -> None:
        """End all waits with an error: the state of the engine is unknown."""
        futures: list[asyncio.Future[Any]] = [wait.future for wait in self._waits.values()]
        futures += self._pending_waits.values()
        futures += chain.from_iterable(self._idle_waits.values())
        futures += [waiter for _, waiter in self._condition_waiters]
        for future in futures:
            if not future.done():
                future.set_exception(new_error())

    def _end_idle_waits(self, lease_id: int) -> None:
        for future in self._idle_waits.get(lease_id, ()):
            if not future.done():
                future.set_result(None)
