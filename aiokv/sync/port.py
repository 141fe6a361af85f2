"""Port: how the handles of an engine in a thread make their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.sync.calls import Calls
from aiokv.sync.futures import EngineFuture
from aiokv.sync.lease import SyncLease

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from aiokv.engine import CacheEngine
    from aiokv.sync.answers import Answer
    from aiokv.sync.thread import LoopThread

T = TypeVar("T")
S = TypeVar("S", EngineFuture[Any], SyncLease)


class Port:
    """The way to one engine, which all its leases share.

    Args:
        thread: runs the engine.
        cache: the engine.

    Attributes:
        cache: as given.
        thread: as given.
    """

    __slots__ = ("cache", "thread")

    def __init__(self, thread: LoopThread, cache: CacheEngine) -> None:
        self.cache = cache
        self.thread = thread

    def new_calls(self) -> Calls:
        """Return an empty list of calls."""
        return Calls(self)

    def new_lease(self) -> SyncLease:
        """Return a lease that a call is to match."""
        return SyncLease(self)

    def call(self, record: Callable[[Calls], Answer[T]]) -> T:
        """Make the one call that ``record`` records, and return its value or raise its error."""
        calls = Calls(self)
        answer = record(calls)
        try:
            calls.run()
            return answer.value
        finally:
            del calls, answer  # break the cycle: the error's traceback has this frame

    def start(self, record: Callable[[Calls], S]) -> S:
        """Make the one call that ``record`` records, and return its future or its lease.

        Raises:
            KeyboardInterrupt: the future was cancelled.
        """
        calls = Calls(self)
        made = record(calls)
        try:
            calls.run()
        except BaseException:
            if isinstance(made, EngineFuture):
                made.cancel()  # no caller gets it
            raise
        return made

    def begin(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> EngineFuture[T]:
        """Await ``function(*args)`` on the loop; return the future of its value."""
        return self.start(lambda calls: calls.begin(function, *args))
