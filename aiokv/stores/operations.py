"""Operations: calls of one store that are in flight, each with a deadline and a slot."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.base.plan import Priority
from aiokv.stores.base import Result
from aiokv.stores.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray

    from aiokv.stores.accesses import Accesses
    from aiokv.stores.breaker import Breaker
    from aiokv.stores.guard_statistics import GuardCounts


class Limit(NamedTuple):
    """Limit of one operation.

    Attributes:
        deadline: time of the loop.
        is_failure: an operation that exceeds the deadline counts for the breaker.
    """

    deadline: float
    is_failure: bool = True


class Ended(NamedTuple):
    """End of an operation: its value, or the reason why there is none."""

    value: Any = None
    reason: str = ""

    def array(
        self, length: int, dtype: type[np.generic], largest: Result = Result.FAILED
    ) -> tuple[NDArray[Any] | None, str]:
        """Return the value as an array of ``length`` results; or None, and the reason."""
        if self.reason:
            return None, self.reason
        try:
            array = np.asarray(self.value, dtype)
        except (TypeError, ValueError) as error:
            return None, f"the results are not an array: {error}"
        if array.shape != (length,):
            return None, f"{length} keys have results of shape {array.shape}"
        if dtype is np.uint8 and length and int(array.max()) > largest:
            return None, f"a result is {int(array.max())}; the largest is {largest}"
        return array, ""


class Operations:
    """Operations of one store. Used on one loop.

    The caller of an operation gets its end at the deadline at the latest. The operation keeps its
    slot until the store's coroutine has really ended.

    Args:
        max_concurrent: lookups at a time, and other operations at a time.
        is_open: returns False when no operation may begin.
        counts: counters of the guard.

    Attributes:
        running: those that have not ended.
        overdue: those among them that have exceeded their deadline.
    """

    def __init__(
        self, max_concurrent: int, is_open: Callable[[], bool], counts: GuardCounts
    ) -> None:
        limit = max(1, max_concurrent)
        self._slots = Slots(limit)
        self._lookup_slots = Slots(limit)
        self._is_open = is_open
        self._counts = counts
        self.running: set[asyncio.Task[Ended]] = set()
        self.overdue: set[asyncio.Task[Ended]] = set()

    async def run(
        self,
        operation: str,
        call: Callable[[], Awaitable[Any]],
        breaker: Breaker,
        limit: Limit,
        priority: int = Priority.DEMAND,
        accesses: Accesses | None = None,
    ) -> tuple[Ended | None, asyncio.Task[Ended] | None]:
        """Run an operation until its deadline.

        Args:
            operation: its name; a ``"lookup"`` has slots of its own.
            call: begins it.
            breaker: gets a failure at the deadline; refuses operations while it is open.
            limit: its deadline.
            priority: lower numbers get a slot first.
            accesses: gets the task of the operation.

        Returns:
            The end of the operation; or None, and its task if it has not ended yet.

        Cancellation: the operation is cancelled.
        """
        loop = asyncio.get_running_loop()
        seconds = limit.deadline - loop.time()
        slots = self._lookup_slots if operation == "lookup" else self._slots
        try:
            has_slot = await slots.take(priority, limit.deadline)
        except BaseException:
            breaker.skip_probe(loop.time())
            raise
        if not has_slot:
            self._counts.busy += 1
            breaker.skip_probe(loop.time())
            return None, None
        # May have changed while the operation waited for a slot.
        if not self._is_open() or breaker.state == "open":
            slots.give_back()
            breaker.skip_probe(loop.time())
            return None, None
        task = loop.create_task(_attempt(call))
        self.running.add(task)
        task.add_done_callback(partial(self._note_end, slots))
        if accesses is not None:
            accesses.add(task)
        try:
            await asyncio.wait({task}, timeout=max(limit.deadline - loop.time(), 0.0))
        except BaseException:
            task.cancel()
            breaker.skip_probe(loop.time())
            raise
        if task.done():
            if task.cancelled():
                breaker.skip_probe(loop.time())
                return None, None
            return task.result(), None
        self.overdue.add(task)
        task.cancel()
        self._counts.timeouts += 1
        if limit.is_failure:
            reason = f"{operation} exceeded its deadline of {seconds:g} s"
            breaker.fail(operation, reason, loop.time())
        return None, task

    async def run_alone(self, call: Callable[[], Awaitable[Any]]) -> Ended:
        """Run an operation without a limit, after those beyond their deadlines have ended.

        Cancellation: the operation is cancelled.
        """
        if self.overdue:
            await asyncio.wait(self.overdue)
        task = asyncio.get_running_loop().create_task(_attempt(call))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _note_end(self, slots: Slots, task: asyncio.Task[Ended]) -> None:
        self.running.discard(task)
        self.overdue.discard(task)
        slots.give_back()


async def _attempt(call: Callable[[], Awaitable[Any]]) -> Ended:
    try:
        return Ended(await call())
    except Exception as error:
        return Ended(reason=error_text(error))


def error_text(error: BaseException) -> str:
    """Return the message of an error; its type if it has none."""
    return str(error) or type(error).__name__
