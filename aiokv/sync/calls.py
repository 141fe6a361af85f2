"""Calls: the calls of one scheduler step, which cross to the engine's loop together."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiokv.base.checks import Unique
from aiokv.errors import UsageError
from aiokv.sync import on_loop
from aiokv.sync.answers import Answer, FutureAnswer, ReturnAnswer, without_frames
from aiokv.sync.computing import SyncComputing
from aiokv.sync.crossing import Crossing
from aiokv.sync.futures import EngineFuture
from aiokv.sync.verbs import RecordedVerbs

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from types import TracebackType

    from aiokv.engine.batch import Batch
    from aiokv.sync.lease import SyncLease
    from aiokv.sync.port import Port

T = TypeVar("T")


class Calls(RecordedVerbs, Unique):
    """Calls that ``run`` makes on the engine's loop, in order and in one crossing.

    ::

        calls = engine.calls()
        calls.extend(running, 1)
        lease = calls.match(tokens)
        granted = calls.try_allocate(lease, len(tokens))
        calls.release(finished)
        calls.run()
        if granted.value:
            ...

    Each method records a call and returns its :class:`Answer`, or a lease or future that the call
    fills. Nothing happens before ``run``. No call of another thread and no event of the loop comes
    between two calls of one ``run``. An error of a call does not stop the later calls; the answer
    of the call has the error.

    Parameters, values and errors are those of the method of :class:`aiokv.CacheEngine` or
    :class:`aiokv.Lease`. Later calls may use a lease of ``match`` at once, other calls after
    ``run``; if the match fails, their error is a ``LeaseError`` that names the reason. ``run``
    neither waits for a future nor raises its error; a lease of ``allocate`` that has to wait gets
    its place in line after the calls of this ``run``, and before all later ones.

    Record the calls of one object in one thread at a time. Arrays of tokens must not change before
    ``run`` has returned.
    """

    __slots__ = ("_add", "_answers", "_crossing", "_futures", "_port")

    def __init__(self, port: Port) -> None:
        self._port = port
        self._answers: list[Answer[Any]] = []
        self._add: Callable[[Answer[Any]], None] = self._answers.append
        self._futures: list[EngineFuture[Any]] = []
        self._crossing: Crossing | None = None

    def run(self, *, raise_errors: bool = True) -> list[Answer[Any]]:
        """Make all calls, and wait for their answers.

        Args:
            raise_errors: True to raise the first error of a call after all calls were made; the
                other answers have their values all the same. False to raise none of them, except
                interrupts: read ``error`` or ``value`` of each answer.

        Returns:
            The answers, in the order of the calls.

        Raises:
            Exception: the first error of a call. ``BrokenEngineError`` when the engine's thread has
                failed; ``ClosedError`` when the engine is closed, or belongs to the parent of this
                process. ``release`` and ``end_computing`` are done then, and have no error.
            UsageError: the engine is not open.
            KeyboardInterrupt: also without ``raise_errors``. Call ``run`` again: it makes or awaits
                the calls that are left, and makes no call twice. If this thread was making a call,
                the interrupt is the error of that call, which may have had its effect; an interrupt
                of a change of the engine's state breaks the engine.
        """
        crossing = self._closed()
        answers = self._answers
        if answers:
            crossing.wait()
        error = crossing.first_error
        if error is None or (not raise_errors and isinstance(error, Exception)):
            return answers
        try:
            raise without_frames(error)
        finally:
            del self, crossing, answers, error  # break the cycle: the traceback has this frame

    def post(self) -> None:
        """Send the calls to the engine's thread, and do not wait for it.

        The calls are made before all calls that the same thread makes afterwards. ``run`` waits for
        their answers.

        Raises:
            UsageError: the engine is not open.
            KeyboardInterrupt: as for ``run``; ``post`` again makes no call twice.
        """
        crossing = self._closed()
        if self._answers:
            crossing.send(here=False)

    @property
    def done(self) -> bool:
        """True if all calls were made."""
        crossing = self._crossing
        return not self._answers or (crossing is not None and crossing.done)

    def _closed(self) -> Crossing:
        """Return the crossing of the calls; no call can be added any more."""
        crossing = self._crossing
        if crossing is None:
            self._add = _refuse  # a function, because a method would make a cycle of references
            crossing = self._crossing = Crossing(self._port.thread, self._answers)
            for future in self._futures:
                future.note_sent()
        return crossing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Call ``run``; after an exception in the block, make no call."""
        if exc_type is None:
            self.run()

    def __len__(self) -> int:
        return len(self._answers)

    # --- batches of the model ---------------------------------------------------------------------

    def begin_computing(
        self, leases: Batch[SyncLease] | Iterable[SyncLease]
    ) -> SyncComputing[SyncLease]:
        """Protect the blocks of leases while the model computes; see ``CacheEngine.computing``.

        Returns:
            The batch, for ``end_computing`` in a later crossing. If this call fails, with a
            ``LeaseError`` for example, no batch has begun.
        """
        port, named = self._port, on_loop.kept("leases", leases)
        computing: SyncComputing[SyncLease] = SyncComputing(
            port, lambda: port.cache.computing(on_loop.inners_of(named))
        )
        self._add(Answer(computing.begin, ()))
        return computing

    def end_computing(self, computing: SyncComputing[Any], *work: Any) -> Answer[None]:
        """End a batch, no earlier than its work.

        If one of the arguments is refused, with a ``UsageError``, the batch has not ended, and
        keeps its blocks: call it again.

        Args:
            computing: as ``begin_computing`` has returned it.
            work: events or ``concurrent.futures.Future`` objects, as for
                ``ComputeBatch.ends_with``.
        """
        answer = ReturnAnswer(computing.end, work)
        self._add(answer)
        return answer

    # --- anything else ----------------------------------------------------------------------------

    def add(self, function: Callable[..., T], /, *args: Any) -> Answer[T]:
        """Call ``function(*args)`` on the engine's loop, where it may use ``SyncEngine.cache``.

        Args:
            function: returns quickly; all requests wait meanwhile. For coroutine functions use
                ``begin``.
            args: its arguments.
        """
        answer = Answer(_checked, (function, args))
        self._add(answer)
        return answer

    def begin(
        self, function: Callable[..., Coroutine[Any, Any, T]], /, *args: Any
    ) -> EngineFuture[T]:
        """Await ``function(*args)`` on the engine's loop.

        Returns:
            A future of its value. ``cancel()`` cancels the coroutine.
        """
        future: EngineFuture[T] = self._new_future()
        self._add(FutureAnswer(on_loop.begin, (future, function, args)))
        return future

    def _new_future(self) -> EngineFuture[Any]:
        future: EngineFuture[Any] = EngineFuture(self._port.thread)
        self._futures.append(future)
        return future

    def __repr__(self) -> str:
        state = "not run yet" if self._crossing is None else "run"
        return f"<{len(self._answers)} Calls, {state}>"


def _checked(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    value = function(*args)
    if inspect.iscoroutine(value):
        value.close()
        raise UsageError(f"{function!r} returned a coroutine", hint="use begin() instead of add()")
    return value


def _refuse(answer: Answer[Any]) -> None:
    raise UsageError(
        "these calls were run already; no call can be added",
        hint="make a new object with engine.calls()",
    )
