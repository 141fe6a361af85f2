"""Argument and result types of the public API."""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import msgspec
import numpy as np

from aiokv.base.checks import integer, sequence
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv._native import Histogram

    TokenIds = NDArray[np.integer] | Sequence[int]

Tier = Literal["device", "host"]


class LeaseState(StrEnum):
    """State of a :class:`Lease`."""

    MATCHED = "matched"  # holds no blocks; also after `preempt` without a swap
    WAITING = "waiting"  # waits for its salt's quota or for capacity
    GRANTED = "granted"  # has a block table
    FAILED = "failed"  # granted, but an onload failed; `recompute_from` accepts the failure
    SWAPPING = "swapping"  # its table is being moved to host memory
    SWAPPED = "swapped"  # its table is in host memory
    LOST = "lost"  # its blocks were lost with a rank; `resume` allocates again
    RELEASED = "released"  # cannot be used any more


class Hit(NamedTuple):
    """Cached tokens of a prompt by tier: the device part of the prefix, then the host part."""

    device_tokens: int
    host_tokens: int

    @property
    def total(self) -> int:
        return self.device_tokens + self.host_tokens


class Item(NamedTuple):
    """Multimodal item of a prompt: an image, or a segment of audio or video.

    The placeholder tokens of an item do not identify its content. So prompts share the blocks that
    an item covers only if they have the same item at the same position. A model encodes an item as
    a whole: a match never ends inside an item, but before it, unless ``CacheConfig.item_hits`` is
    ``"partial"``.

    Attributes:
        content_hash: hash of the encoded content and of the encoder settings; the cache treats
            items with equal hashes as equal.
        offset: first position of the item, counted from the first position of the prompt, also for
            items of ``Lease.append``.
        length: number of positions of the item.
    """

    content_hash: bytes
    offset: int
    length: int


class DurationHistogram(msgspec.Struct, frozen=True):
    """Durations, counted in buckets whose upper bounds are powers of two seconds.

    Attributes:
        counts: durations per bucket: those above the bound before it, up to its own; the last
            bucket has no bound.
        sum_seconds: sum of all durations.
        bounds_seconds: upper bounds of all buckets but the last: from 2**-20 s to 4096 s.
    """

    counts: list[int]
    sum_seconds: float
    bounds_seconds: list[float]

    @classmethod
    def of(cls, histogram: Histogram) -> Self:
        """Return the present counts of a native histogram."""
        return cls(histogram.counts, histogram.sum_seconds, histogram.bounds_seconds())

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)


class RequestStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Waits of requests since the engine was made, and how they ended.

    Attributes:
        capacity_wait: waits for capacity and for the salt's quota, of all leases that were not
            granted at once, without the time that they waited for stores.
        pending_wait: waits for blocks that another lease computes.
        store_wait: waits for blocks from the stores.
        peer_wait: waits for blocks that another engine sends.
        onload: times from the submission of an onload to the arrival of its last layer.
        hold: times for which a lease that computes had blocks, to a tick of the kernel (1 to 10
            ms); added when it gives them back.
        timed_out_waits: ``allocate`` calls that raised ``AllocateTimeout``.
        cancelled_waits: ``allocate`` calls that were cancelled while they waited.
        refused_waits: ``allocate`` calls that raised another error while they waited.
        too_large_requests: ``allocate`` calls that raised ``RequestTooLarge``.
        declined_fetches: requests that computed blocks that a store had, because this was sooner.
        late_fetches: requests that stopped waiting for a store that was slower than expected.
        prefill_tokens_per_second: configured speed of the model on prompts, or the one measured in
            the newest batches that computed prompts; 0.0 before the first measurement.
    """

    capacity_wait: DurationHistogram
    pending_wait: DurationHistogram
    store_wait: DurationHistogram
    peer_wait: DurationHistogram
    onload: DurationHistogram
    hold: DurationHistogram
    timed_out_waits: int
    cancelled_waits: int
    refused_waits: int
    too_large_requests: int
    declined_fetches: int
    late_fetches: int
    prefill_tokens_per_second: float


class WindowStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one window group: its pools, and counters since the engine was made.

    A device block is free, cached, or belongs to one lease alone; a block in host memory is free,
    cached, or the destination of a transfer. Leases have *set aside* the blocks that they have and
    those that they will have. *Saved* blocks were copied to host memory, *stored* ones to the
    stores. *Unstored* blocks were to be saved to the stores, and were dropped, rejected or refused,
    or the save failed. *Fetched* and *unfetched* blocks as in :class:`Statistics`.
    """

    device_blocks: int
    device_free: int
    device_cached: int
    device_set_aside: int
    host_blocks: int
    host_free: int
    host_cached: int
    saved_blocks: int
    onloaded_blocks: int
    evicted_host_blocks: int
    stored_blocks: int
    unstored_blocks: int
    fetched_blocks: int
    unfetched_blocks: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was made, and the current state of its pools.

    The capacity of a pool is ``free + cached + leased + in_flight`` blocks: *leased* blocks belong
    to one lease alone, *cached* blocks to the index (with or without leases that use them), and
    *in flight* blocks are the destination of a transfer. A state slot is free, holds a snapshot, or
    belongs to a lease; one in host memory is free, holds a snapshot, or is the destination of a
    transfer. ``restored_states`` counts ``onloaded_states``, which came from host memory, too.
    *Releasing* leases are released, but a batch or a transfer of a peer in flight uses their
    blocks. ``windows`` has the blocks of each window group.

    *Waiting* leases wait for capacity, and the others named so for the quota of their salt, for
    stores, or for blocks that another lease computes. *Computed* tokens are positions that
    ``commit`` has noted, again after a preemption; those of prompts are counted separately, too.
    *Preemptions* gave up a block table, *swaps* began to move one to host memory, and *lost* leases
    lost theirs with a rank. *Expired* leases were not used within their ``ttl_seconds``, and were
    released.

    Blocks are *evicted* and *dropped* by cause: ``capacity`` (room for a lease, a host copy or a
    fetch), ``request`` (``CacheEngine.evict``), ``resize``, ``sleep``, ``reset`` or ``failure`` of
    a copy. Dropped blocks are in no tier any more.

    ``hit_store_tokens`` is a part of the hits of device and host: tokens of blocks that a fetch
    from a store had brought. Only the first lease that is granted with such a block counts; leases
    of pins and prefetches do not. *Fetched* blocks arrived and were verified, *unfetched* ones were
    missing, wrong or late. Blocks that were to be saved to the stores and were not are *dropped*
    (the queue was full, or the block was evicted or the host tier slept before), *rejected* by
    ``CacheConfig.store_admission``, *refused* by a store and saved by none, or *failed*; snapshots
    of recurrent state are *unstored* in all these cases.

    ``receives`` and ``sends`` are transfers from and to peers, which have begun. *Received* blocks
    and states arrived and were verified; *sent* ones were acknowledged by the receiver.
    """

    device_blocks: int
    device_free: int
    device_cached: int
    device_leased: int
    device_in_flight: int
    host_blocks: int
    host_free: int
    host_cached: int
    host_in_flight: int
    evictable_blocks: int
    leases: int
    releasing_leases: int
    waiting: int
    waiting_for_quota: int
    waiting_for_store: int
    waiting_for_pending: int
    preemptions: int
    swaps: int
    lost_leases: int
    expired_leases: int
    prompt_tokens: int
    computed_tokens: int
    computed_prompt_tokens: int
    hit_device_tokens: int
    hit_host_tokens: int
    hit_store_tokens: int
    grants: int
    published_blocks: int
    evicted_device_blocks: int
    evicted_host_blocks: int
    dropped_blocks: int
    evicted_device_by_cause: dict[str, int]
    evicted_host_by_cause: dict[str, int]
    dropped_by_cause: dict[str, int]
    onloaded_blocks: int
    offloaded_blocks: int
    failed_blocks: int
    skipped_backups: int
    reclaimed_twins: int
    state_slots: int
    state_free: int
    state_snapshots: int
    restored_states: int
    evicted_snapshots: int
    fetches: int
    fetched_blocks: int
    unfetched_blocks: int
    saved_blocks: int
    dropped_saves: int
    rejected_saves: int
    refused_saves: int
    failed_saves: int
    receives: int
    received_blocks: int
    received_states: int
    received_window_blocks: int
    failed_receives: int
    sends: int
    sent_blocks: int
    sent_states: int
    sent_window_blocks: int
    failed_sends: int
    host_state_slots: int
    host_state_free: int
    host_state_snapshots: int
    saved_snapshots: int
    onloaded_states: int
    evicted_host_snapshots: int
    stored_snapshots: int
    unstored_snapshots: int
    fetched_snapshots: int
    unfetched_snapshots: int
    windows: dict[str, WindowStatistics]
    nodes: int
    index_bytes: int
    token_bytes: int

    @property
    def hit_tokens(self) -> int:
        return self.hit_device_tokens + self.hit_host_tokens


LeaseWait = Literal["", "pending", "store", "quota", "capacity", "onload", "offload", "batch"]


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as ``CacheEngine.leases`` lists it.

    Attributes:
        lease_id: ``Lease.id``.
        owner: ``Lease.owner``; the id in hexadecimal without one.
        state: of the lease; ``"released"`` for a lease whose blocks a batch in flight still uses.
        prompt_tokens: length of the prompt.
        cached_tokens: positions of the grant that needed no computing; before the grant, those of
            the last match.
        num_tokens: positions of the block table.
        computed_tokens: leading positions that are cached or committed.
        blocks: device blocks of the block table.
        age_seconds: time since ``match`` or ``fork``, accurate to 10 ms.
        waits_for: ``"pending"``: blocks that another lease computes; ``"store"``: blocks of a
            store; ``"quota"``: blocks of its salt's quota; ``"capacity"``: device blocks;
            ``"onload"``: transfers to the device; ``"offload"``: its swap to host memory;
            ``"batch"``: the batches in flight that use its blocks. Empty when it waits for nothing.
    """

    lease_id: int
    owner: str
    state: LeaseState
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    computed_tokens: int
    blocks: int
    age_seconds: float
    waits_for: LeaseWait


class PrefixInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Stretch of blocks without a fork, of the prefix tree.

    Attributes:
        prefix_id: number of its first block while the block is cached.
        parent: place of the stretch before it in ``HotPrefixes.prefixes``; None for the beginning
            of a prompt.
        salt: salt of the prompts.
        adapter: adapter of the prompts.
        first_token: position of its first token in the prompt.
        num_tokens: tokens of the stretch.
        blocks: blocks of the stretch, of which ``device_blocks`` have a copy on the device, and
            ``host_blocks`` one in host memory.
        uses: number of times that a lease has computed the stretch or found it on the device (with
            stores, also in host memory) since the stretch was cached, up to 255.
        leases: leases that hold its first block now.
        branches: stretches that follow.
    """

    prefix_id: int
    parent: int | None
    salt: str
    adapter: str
    first_token: int
    num_tokens: int
    blocks: int
    device_blocks: int
    host_blocks: int
    uses: int
    leases: int
    branches: int


class HotPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Most used prefixes of the cache, as ``CacheEngine.hottest_prefixes`` returns them.

    Attributes:
        prefixes: stretches in order of their uses; each one comes after its parent.
        is_complete: False when the tree was too large to search all of it: of a block with more
            than 1,024 continuations, or of more than 4,096 blocks, others may be hotter.
    """

    prefixes: list[PrefixInfo]
    is_complete: bool


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine, for health checks.

    Attributes:
        phase: ``"new"`` before ``async with``, then ``"open"``, ``"closing"``, ``"closed"``;
            ``"abandoned"`` in a process that was forked from the engine's.
        failure: reason why the engine is broken; empty while it can serve.
        asleep: tiers whose memory is freed.
        is_paused: nothing is granted now.
        unpinned_bytes: host memory that the device has not page-locked yet; transfers that use it
            wait. With ranks, at most ``RankTimeouts.heartbeat`` old.
        unavailable_stores: URLs of the stores that requests do without now, each once, because a
            store could not be opened or its operations fail. See ``engine.store_statistics``.
    """

    phase: Literal["new", "open", "closing", "closed", "abandoned"]
    failure: str
    asleep: list[Tier]
    is_paused: bool
    unpinned_bytes: int
    unavailable_stores: list[str] = []


def as_items(items: Sequence[Item]) -> list[Item]:
    """Convert items, each an ``Item`` or a tuple, to ``Item`` with plain integers.

    Raises:
        UsageError: an item is not (bytes, int, int).
    """
    return [_as_item(item) for item in sequence("items", items)]


def _as_item(item: object) -> Item:
    if not isinstance(item, tuple) or len(item) != 3:
        raise UsageError(f"item is {item!r}; it must be an Item(content_hash, offset, length)")
    content_hash, offset, length = item
    if not isinstance(content_hash, bytes):
        raise UsageError(f"item.content_hash is {content_hash!r}; it must be bytes")
    return Item(content_hash, integer("item.offset", offset), integer("item.length", length))


def as_priority(priority: object) -> int:
    """Convert a priority to an int.

    Raises:
        UsageError: ``priority`` is not an integer.
    """
    try:
        return operator.index(priority)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"priority is {priority!r}; it must be an integer (lower numbers are granted first)"
        ) from None


def lease_name(owner: str, lease_id: int) -> str:
    """Return the name of a lease in messages and records: its owner, or its id without one."""
    return owner or f"{lease_id:#x}"


def as_tokens(tokens: TokenIds) -> NDArray[np.int32]:
    """Convert token ids to a contiguous int32 array; such an array is not copied.

    Raises:
        UsageError: ``tokens`` is not one-dimensional, not integers, or has an id outside int32.
    """
    return _as_ids("token", "tokens", tokens)


def as_block_ids(block_ids: TokenIds) -> NDArray[np.int32]:
    """Convert block ids to a contiguous int32 array; such an array is not copied.

    Raises:
        UsageError: as for ``as_tokens``.
    """
    return _as_ids("block", "block_ids", block_ids)


def _as_ids(kind: str, name: str, ids: TokenIds) -> NDArray[np.int32]:
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1:
        return np.ascontiguousarray(ids)
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{name} must be a flat sequence of int32 ids: {error}") from error
    if array.ndim == 0:
        raise UsageError(
            f"{name} is a {type(ids).__name__}; it must be a sequence of {kind} ids",
            hint="encode the text with the tokenizer" if isinstance(ids, str | bytes) else "",
        )
    if array.ndim != 1:
        raise UsageError(f"{name} has {array.ndim} dimensions; it must have one dimension")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name} has dtype {array.dtype}; {kind} ids must be integers")
    converted = array.astype(np.int32)
    same = converted == array
    if not same.all():
        position = int(same.argmin())
        raise UsageError(
            f"{kind} id {array[position]} at position {position} is outside int32; it must be "
            "between -2147483648 and 2147483647"
        )
    return converted
