"""Calls: the calls of one scheduler step, which cross to the engine's thread together."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.errors import UsageError
from aiokv.sync import verbs
from aiokv.sync.answers import Answer, ReturnAnswer, without_frames
from aiokv.sync.computing import SyncComputing
from aiokv.sync.crossing import Crossing
from aiokv.sync.futures import EngineFuture
from aiokv.sync.lease import SyncLease

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.types import Hit, Item, TokenIds
    from aiokv.sync.layers import SyncLayers
    from aiokv.sync.port import Port
    from aiokv.worker.device.base import Event

T = TypeVar("T")


class Calls(Unique):
    """Calls that ``run`` makes in the engine's thread, in order and in one crossing.

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
                other answers have their values all the same. False to raise none of them: read
                ``error`` or ``value`` of each answer.

        Returns:
            The answers, in the order of the calls.

        Raises:
            Exception: the first error of a call. ``BrokenEngineError`` when the engine's thread has
                failed; ``ClosedError`` when the engine is closed, or belongs to the parent of this
                process. ``release`` and ``end_computing`` are done then, and have no error.
            UsageError: the engine is not open.
            KeyboardInterrupt: the engine makes all calls nevertheless, unless the interrupt came
                before they were sent. Call ``run`` again: it waits for the same answers, and makes
                no call twice.
        """
        crossing = self._crossing
        if crossing is None:
            self._add = _refuse  # no method: that would make a cycle of references
            crossing = self._crossing = Crossing(self._port.thread, self._answers)
            for future in self._futures:
                future.note_sent()
        answers = self._answers
        if answers:
            crossing.wait()
        error = crossing.first_error if raise_errors else None
        if error is None:
            return answers
        try:
            raise without_frames(error)
        finally:
            del self, crossing, answers, error  # the traceback has this frame: break the cycle

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

    # --- prompts ----------------------------------------------------------------------------------

    def match(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
        owner: str = "",
        read: bool = True,
        write: bool = True,
    ) -> SyncLease:
        """Look up the cached prefix of a prompt; see ``CacheEngine.match``.

        Returns:
            A lease that later calls of this object may use at once, and other calls after ``run``.
            If the match fails, their error is a ``LeaseError`` that names the reason.
        """
        lease = SyncLease(self._port)
        self._add(
            Answer(
                verbs.match,
                (lease, self._port.cache, tokens, salt, adapter, items, owner, read, write),
            )
        )
        return lease

    def would_hit(
        self,
        tokens: TokenIds,
        *,
        salt: str = "",
        adapter: str = "",
        items: Sequence[Item] = (),
    ) -> Answer[Hit]:
        """Return the cached prefix of a prompt, and change nothing; see ``CacheEngine.would_hit``.

        Returns:
            Answer with the prefix in tokens by tier.
        """
        answer = Answer(verbs.would_hit, (self._port.cache, tokens, salt, adapter, items))
        self._add(answer)
        return answer

    # --- capacity ---------------------------------------------------------------------------------

    def hit_blocks(self, lease: SyncLease) -> Answer[NDArray[np.int32]]:
        """Return the device ids of the hit; see ``Lease.hit_blocks``."""
        answer = Answer(verbs.hit_blocks, (lease,))
        self._add(answer)
        return answer

    def try_allocate(
        self,
        lease: SyncLease,
        num_tokens: int,
        *,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> Answer[bool]:
        """Allocate without waiting; see ``Lease.try_allocate``."""
        answer = Answer(verbs.try_allocate, (lease, num_tokens, reserve_blocks, ttl_seconds))
        self._add(answer)
        return answer

    def can_allocate(
        self, lease: SyncLease, num_tokens: int, *, reserve_blocks: int | None = None
    ) -> Answer[bool]:
        """Ask if ``try_allocate`` would succeed now; see ``Lease.can_allocate``."""
        answer = Answer(verbs.can_allocate, (lease, num_tokens, reserve_blocks))
        self._add(answer)
        return answer

    def allocatable_blocks(
        self, *, salt: str = "", reserve_blocks: int | None = None, limit: int | None = None
    ) -> Answer[int]:
        """Return the blocks of the largest request that could be granted now.

        See ``CacheEngine.allocatable_blocks``.
        """
        args = (self._port.cache, salt, reserve_blocks, limit)
        answer = Answer(verbs.allocatable_blocks, args)
        self._add(answer)
        return answer

    def extendable_blocks(self, *, limit: int | None = None) -> Answer[int]:
        """Return the blocks that ``extend`` could take; see ``CacheEngine.extendable_blocks``."""
        answer = Answer(verbs.extendable_blocks, (self._port.cache, limit))
        self._add(answer)
        return answer

    def allocate(
        self,
        lease: SyncLease,
        num_tokens: int,
        *,
        priority: int = 0,
        timeout: float | None = None,
        wait_pending: float = 0.0,
        wait_store: float = 0.0,
        queued_tokens: int = 0,
        reserve_blocks: int | None = None,
        ttl_seconds: float | None = None,
    ) -> EngineFuture[SyncLease]:
        """Wait for capacity, then take blocks; see ``SyncLease.allocate``.

        A lease that has to wait gets its place in line after the calls of this ``run``, and before
        all later ones.

        Returns:
            A future of the lease, which has the errors of ``Lease.allocate``: ``run`` does not
            raise them, and does not wait for the future.
        """
        future: EngineFuture[SyncLease] = self._new_future()
        wait = verbs.Waits(wait_pending, wait_store, queued_tokens)
        args = (future, lease, num_tokens, priority, timeout, wait, reserve_blocks, ttl_seconds)
        self._add(Answer(verbs.allocate, args))
        return future

    def extend(self, leases: Iterable[SyncLease], num_tokens: int) -> Answer[None]:
        """Add positions to each lease: to all of them, or to none; see ``CacheEngine.extend``."""
        named = checks.sequence("leases", leases)
        answer = Answer(verbs.extend, (self._port.cache, named, num_tokens))
        self._add(answer)
        return answer

    def preempt(self, lease: SyncLease) -> Answer[None]:
        """Give the device blocks back; see ``Lease.preempt``."""
        answer = Answer(verbs.preempt, (lease,))
        self._add(answer)
        return answer

    def swap_out(self, lease: SyncLease) -> EngineFuture[None]:
        """Move the whole block table to host memory; see ``SyncLease.swap_out``."""
        future: EngineFuture[None] = self._new_future()
        self._add(Answer(verbs.swap_out, (future, lease)))
        return future

    def expire_after(self, lease: SyncLease, seconds: float) -> Answer[None]:
        """Let the lease be released unless it is used in time; see ``Lease.expire_after``."""
        answer = Answer(verbs.expire_after, (lease, seconds))
        self._add(answer)
        return answer

    def keep(self, lease: SyncLease) -> Answer[None]:
        """End the limit of ``expire_after``; see ``Lease.keep``."""
        answer = Answer(verbs.keep, (lease,))
        self._add(answer)
        return answer

    def fork(
        self, lease: SyncLease, *, owner: str = "", stream: object = None
    ) -> Answer[SyncLease]:
        """Make a second lease on the same positions; see ``Lease.fork``."""
        answer = Answer(verbs.fork, (SyncLease(self._port), lease, owner, stream))
        self._add(answer)
        return answer

    # --- device blocks of a server --------------------------------------------------------------

    def assign(
        self, lease: SyncLease, block_ids: TokenIds, *, computed_tokens: int = 0
    ) -> Answer[None]:
        """Name the device blocks of the next positions; see ``Lease.assign``."""
        answer = Answer(verbs.assign, (lease, block_ids, computed_tokens))
        self._add(answer)
        return answer

    def is_idle(self, lease: SyncLease) -> Answer[bool]:
        """Ask if no transfer uses the device blocks of a lease; see ``Lease.is_idle``."""
        answer = Answer(verbs.is_idle, (lease,))
        self._add(answer)
        return answer

    def idle(self, lease: SyncLease) -> EngineFuture[None]:
        """Wait until no transfer uses the device blocks of a lease; see ``Lease.idle``."""
        future: EngineFuture[None] = self._new_future()
        self._add(Answer(verbs.idle, (future, lease)))
        return future

    def release(self, lease: SyncLease, after: Event | None = None) -> Answer[None]:
        """Release a lease; see ``Lease.release``. Idempotent."""
        answer = ReturnAnswer(verbs.release, (lease, after))
        self._add(answer)
        return answer

    # --- computed positions -----------------------------------------------------------------------

    def commit(self, lease: SyncLease, num_tokens: int, ready: Event | None = None) -> Answer[int]:
        """Note that the first ``num_tokens`` positions are computed; see ``Lease.commit``."""
        answer = Answer(verbs.commit, (lease, num_tokens, ready))
        self._add(answer)
        return answer

    def commit_many(self, leases: Iterable[SyncLease], num_tokens: Iterable[int]) -> Answer[int]:
        """Call ``commit`` for each lease; see ``CacheEngine.commit_many``."""
        named = checks.sequence("leases", leases)
        counts = checks.sequence("num_tokens", num_tokens)
        answer = Answer(verbs.commit_many, (self._port.cache, named, counts))
        self._add(answer)
        return answer

    def append(
        self, lease: SyncLease, tokens: TokenIds, *, items: Sequence[Item] = ()
    ) -> Answer[None]:
        """Set the tokens of the next positions; see ``Lease.append``."""
        answer = Answer(verbs.append, (lease, tokens, items))
        self._add(answer)
        return answer

    def truncate(self, lease: SyncLease, num_tokens: int) -> Answer[None]:
        """Give back the positions from ``num_tokens`` on; see ``Lease.truncate``."""
        answer = Answer(verbs.truncate, (lease, num_tokens))
        self._add(answer)
        return answer

    def snapshot(self, lease: SyncLease, num_tokens: int, stream: object = None) -> Answer[bool]:
        """Save the recurrent state after ``num_tokens`` positions; see ``Lease.snapshot``."""
        answer = Answer(verbs.snapshot, (lease, num_tokens, stream))
        self._add(answer)
        return answer

    def recompute_from(self, lease: SyncLease) -> Answer[int | None]:
        """Accept a failed onload; see ``Lease.recompute_from``."""
        answer = Answer(verbs.recompute_from, (lease,))
        self._add(answer)
        return answer

    # --- batches of the model ---------------------------------------------------------------------

    def begin_computing(self, leases: Iterable[SyncLease]) -> SyncComputing:
        """Protect the blocks of leases while the model computes; see ``CacheEngine.computing``.

        Returns:
            The batch, for ``end_computing`` in a later crossing. If this call fails, with a
            ``LeaseError`` for example, no batch has begun.
        """
        computing = SyncComputing(self._port, checks.sequence("leases", leases))
        self._add(Answer(computing.begin, ()))
        return computing

    def end_computing(self, computing: SyncComputing, *work: Any) -> Answer[None]:
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

    def note_prefill(self, num_tokens: int, seconds: float) -> Answer[None]:
        """Note the time of a prefill; see ``CacheEngine.note_prefill``."""
        answer = Answer(self._port.cache.note_prefill, (num_tokens, seconds))
        self._add(answer)
        return answer

    def step(self, event: Event | None = None) -> Answer[int]:
        """Close the open step, whose work finishes with ``event``; see ``CacheEngine.step``."""
        answer = Answer(self._port.cache.step, (event,))
        self._add(answer)
        return answer

    def block_tables(
        self,
        leases: Iterable[SyncLease],
        out: NDArray[np.int32] | None = None,
        fill: int = -1,
        group: str | None = None,
    ) -> Answer[NDArray[np.int32]]:
        """Return the block tables as rows; see ``CacheEngine.block_tables``."""
        named = checks.sequence("leases", leases)
        answer = Answer(verbs.block_tables, (self._port.cache, named, out, fill, group))
        self._add(answer)
        return answer

    def layers(self, leases: Iterable[SyncLease]) -> Answer[SyncLayers]:
        """Return one layer counter for a batch; see ``CacheEngine.layers``."""
        answer = Answer(verbs.layers, (self._port, checks.sequence("leases", leases)))
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
        self._add(Answer(verbs.begin, (future, function, args)))
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
