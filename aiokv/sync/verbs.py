"""The verbs of leases, as functions that run on the engine's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiokv.base import checks
from aiokv.base.types import as_priority
from aiokv.errors import AiokvError, InternalError
from aiokv.sync.answers import without_frames
from aiokv.sync.layers import SyncLayers
from aiokv.sync.lease import inner_of, inners_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.types import Hit, Item, TokenIds
    from aiokv.engine import CacheEngine
    from aiokv.engine.lease import Lease
    from aiokv.sync.futures import EngineFuture
    from aiokv.sync.lease import SyncLease
    from aiokv.sync.port import Port
    from aiokv.worker.device.base import Event

T = TypeVar("T")


class Waits(NamedTuple):
    """Arguments of ``Lease.allocate`` that say how long it waits for blocks.

    Attributes:
        pending: ``wait_pending``, in seconds.
        store: ``wait_store``, in seconds.
        queued_tokens: ``queued_tokens``.
    """

    pending: float
    store: float
    queued_tokens: int


def match(
    lease: SyncLease,
    cache: CacheEngine,
    tokens: TokenIds,
    salt: str,
    adapter: str,
    items: Sequence[Item],
    owner: str,
    read: bool,
    write: bool,
) -> SyncLease:
    """Match, and let ``lease`` stand for the result."""
    try:
        found = cache.match(
            tokens, salt=salt, adapter=adapter, items=items, owner=owner, read=read, write=write
        )
    except BaseException as error:
        lease.note_no_match(error)
        raise
    lease.note_match(found)
    return lease


def would_hit(
    cache: CacheEngine, tokens: TokenIds, salt: str, adapter: str, items: Sequence[Item]
) -> Hit:
    return cache.would_hit(tokens, salt=salt, adapter=adapter, items=items)


def hit_blocks(lease: SyncLease) -> NDArray[np.int32]:
    return inner_of(lease).hit_blocks


def try_allocate(
    lease: SyncLease, num_tokens: int, reserve_blocks: int | None, ttl_seconds: float | None
) -> bool:
    inner = inner_of(lease)
    if not inner.try_allocate(num_tokens, reserve_blocks=reserve_blocks, ttl_seconds=ttl_seconds):
        return False
    lease.note_grant(inner)
    return True


def can_allocate(lease: SyncLease, num_tokens: int, reserve_blocks: int | None) -> bool:
    return inner_of(lease).can_allocate(num_tokens, reserve_blocks=reserve_blocks)


def allocatable_blocks(
    cache: CacheEngine, salt: str, reserve_blocks: int | None, limit: int | None
) -> int:
    return cache.allocatable_blocks(salt=salt, reserve_blocks=reserve_blocks, limit=limit)


def extendable_blocks(cache: CacheEngine, limit: int | None) -> int:
    return cache.extendable_blocks(limit=limit)


def allocate(
    future: EngineFuture[SyncLease],
    lease: SyncLease,
    num_tokens: int,
    priority: int,
    timeout: float | None,
    waits: Waits,
    reserve_blocks: int | None,
    ttl_seconds: float | None,
) -> None:
    """Grant now, or begin to wait: without a task where the device has room."""
    if future.cancelled():
        future.note_cancelled()
        return
    try:
        inner = inner_of(lease)
        checks.timeout(timeout)
        as_priority(priority)
        at_once = waits.pending == waits.store == 0.0
        if at_once and try_allocate(lease, num_tokens, reserve_blocks, ttl_seconds):
            if not future.settle(lease):
                give_back(inner)
            return
    except AiokvError as error:
        future.fail(without_frames(error))
        return

    async def wait() -> SyncLease:
        await inner.allocate(
            num_tokens,
            priority=priority,
            timeout=timeout,
            wait_pending=waits.pending,
            wait_store=waits.store,
            queued_tokens=waits.queued_tokens,
            reserve_blocks=reserve_blocks,
            ttl_seconds=ttl_seconds,
        )
        lease.note_grant(inner)
        return lease

    future.start(wait(), undo=lambda: give_back(inner))


def give_back(lease: Lease) -> None:
    """Take back a grant whose future was cancelled in the same moment."""
    if lease.id:
        at_once(lease.preempt())


def extend(cache: CacheEngine, leases: Sequence[SyncLease], num_tokens: int) -> None:
    cache.extend(inners_of(leases), num_tokens)


def preempt(lease: SyncLease) -> None:
    at_once(inner_of(lease).preempt())


def swap_out(future: EngineFuture[None], lease: SyncLease) -> None:
    begin(future, lambda: inner_of(lease).preempt(swap=True), ())


def expire_after(lease: SyncLease, seconds: float) -> None:
    inner_of(lease).expire_after(seconds)


def keep(lease: SyncLease) -> None:
    inner_of(lease).keep()


def fork(child: SyncLease, lease: SyncLease, owner: str, stream: object) -> SyncLease:
    child.note_fork(inner_of(lease).fork(owner=owner, stream=stream))
    return child


def assign(lease: SyncLease, block_ids: TokenIds, computed_tokens: int) -> None:
    inner_of(lease).assign(block_ids, computed_tokens=computed_tokens)


def is_idle(lease: SyncLease) -> bool:
    return inner_of(lease).is_idle


def idle(future: EngineFuture[None], lease: SyncLease) -> None:
    """Settle the future now, or begin to wait: without a task for a lease that is idle."""
    if future.cancelled():
        future.note_cancelled()
        return
    try:
        if is_idle(lease):
            future.settle(None)
            return
    except AiokvError as error:
        future.fail(without_frames(error))
        return
    future.start(inner_of(lease).idle())


def release(lease: SyncLease, after: Event | None) -> None:
    if not getattr(lease, "is_unmatched", False):  # else there is nothing to release
        inner_of(lease).release(after)


def commit(lease: SyncLease, num_tokens: int, ready: Event | None) -> int:
    return inner_of(lease).commit(num_tokens, ready)


def commit_many(cache: CacheEngine, leases: Sequence[SyncLease], num_tokens: Sequence[int]) -> int:
    return cache.commit_many(inners_of(leases), num_tokens)


def append(lease: SyncLease, tokens: TokenIds, items: Sequence[Item]) -> None:
    inner_of(lease).append(tokens, items=items)


def truncate(lease: SyncLease, num_tokens: int) -> None:
    inner_of(lease).truncate(num_tokens)


def snapshot(lease: SyncLease, num_tokens: int, stream: object) -> bool:
    return inner_of(lease).snapshot(num_tokens, stream)


def recompute_from(lease: SyncLease) -> int | None:
    inner = inner_of(lease)
    position = inner.recompute_from()
    if position is not None:
        lease.note_grant(inner)
    return position


def block_tables(
    cache: CacheEngine,
    leases: Sequence[SyncLease],
    out: NDArray[np.int32] | None,
    fill: int,
    group: str | None,
) -> NDArray[np.int32]:
    return cache.block_tables(inners_of(leases), out, fill, group)


def layers(port: Port, leases: Sequence[SyncLease]) -> SyncLayers:
    return SyncLayers(port, port.cache.layers(inners_of(leases)))


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
        InternalError: it does.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise InternalError(f"{coroutine!r} has suspended")
