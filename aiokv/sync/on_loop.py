"""Functions for the engine's loop, for verbs that need more than a call of the async verb."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.base import checks
from aiokv.base.types import as_priority
from aiokv.engine.batch import Batch
from aiokv.errors import AiokvError, InternalError, UsageError
from aiokv.sync.answers import without_frames
from aiokv.sync.computing import SyncComputing

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from aiokv.engine.lease import Lease
    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.lease import SyncLease
    from aiokv.sync.port import Port

T = TypeVar("T")


def inner_of(lease: SyncLease) -> Lease:
    """Return the engine's lease of a handle.

    Raises:
        UsageError: ``lease`` is not a ``SyncLease``, or is not matched yet.
        LeaseError: the lease could not be matched.
    """
    try:
        return lease.inner
    except AttributeError:
        raise UsageError(f"lease is {checks.shown(lease)}; it must be a SyncLease") from None


def kept(name: str, values: Batch[Any] | Iterable[T]) -> Batch[Any] | list[T]:
    """Return an argument for a recorded call: a copy of its present elements, or a batch itself."""
    return values if isinstance(values, Batch) else checks.sequence(name, values)


def inners_of(leases: Batch[Any] | Sequence[SyncLease]) -> Batch[Any] | list[Lease]:
    """Return the engine's leases of handles, or a batch as it is.

    Raises the errors of ``inner_of``.
    """
    if isinstance(leases, Batch):
        return leases
    try:
        return [lease.inner for lease in leases]
    except AttributeError:
        return [inner_of(lease) for lease in leases]  # raises the error that names the element


def step_of(batch: object) -> Any:
    """Return the engine's object for leases that are computed; a batch as it is.

    Raises:
        UsageError: the computing has not begun.
    """
    return batch.inner if isinstance(batch, SyncComputing) else batch


def match(lease: SyncLease, port: Port, arguments: dict[str, Any]) -> None:
    """Match, and set the result as the lease of the handle ``lease``."""
    try:
        found = port.cache.match(**arguments)
    except BaseException as error:
        lease.match_error = error
        raise
    lease.hit = found.hit
    lease.inner = found


def allocate(future: EngineFuture[SyncLease], lease: SyncLease, arguments: dict[str, Any]) -> None:
    """Grant now, or begin to wait: without a task where the device has room."""
    if future.cancelled():
        future.note_cancelled()
        return
    try:
        inner = inner_of(lease)
        checks.timeout(arguments["timeout"])
        as_priority(arguments["priority"])
        waits = arguments["wait_pending"] != 0.0 or arguments["wait_store"] != 0.0
        if not waits and inner.try_allocate(
            arguments["num_tokens"],
            reserve_blocks=arguments["reserve_blocks"],
            ttl_seconds=arguments["ttl_seconds"],
        ):
            lease.cached_tokens = inner.cached_tokens
            if not future.settle(lease):
                give_back(inner)
            return
    except AiokvError as error:
        future.fail(without_frames(error))
        return

    async def wait() -> SyncLease:
        await inner.allocate(**arguments)
        lease.cached_tokens = inner.cached_tokens
        return lease

    future.start(wait(), undo=lambda: give_back(inner))


def give_back(lease: Lease) -> None:
    """Undo a grant whose future was cancelled at the same time."""
    if lease.id:
        at_once(lease.preempt())


def forked(port: Port, lease: Lease) -> SyncLease:
    """Return the handle of a fork, which is granted."""
    handle = port.new_lease()
    handle.inner, handle.hit = lease, lease.hit
    handle.cached_tokens = lease.cached_tokens
    return handle


def idle(future: EngineFuture[None], lease: SyncLease, arguments: dict[str, Any]) -> None:
    """Settle the future now, or begin to wait: without a task for a lease that is idle."""
    if future.cancelled():
        future.note_cancelled()
        return
    try:
        inner = inner_of(lease)
        if inner.is_idle:
            future.settle(None)
            return
    except AiokvError as error:
        future.fail(without_frames(error))
        return
    future.start(inner.idle())


def release(lease: SyncLease, arguments: dict[str, Any]) -> None:
    """Release a lease. Do nothing if its match has failed."""
    if getattr(lease, "match_error", None) is None:
        inner_of(lease).release(**arguments)


def begin(
    future: EngineFuture[T],
    function: Callable[..., Coroutine[Any, Any, T]],
    args: tuple[Any, ...],
) -> None:
    """Await ``function(*args)`` in a task."""
    if future.cancelled():
        future.note_cancelled()
        return
    try:
        coroutine = function(*args)
    except BaseException as error:
        future.fail(without_frames(error))
        return
    future.start(coroutine)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not suspend.

    Raises:
        InternalError: the coroutine suspended.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise InternalError(f"{coroutine!r} suspended; it must complete at once")
