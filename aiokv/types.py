"""Argument and result types of the public API."""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from aiokv.checks import integer, sequence
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
    a whole: a match never ends inside an item, but before it.

    Attributes:
        content_hash: hash of the encoded content and of the encoder settings; the cache treats
            items with equal hashes as equal.
        offset: first position of the item in the prompt.
        length: number of positions of the item.
    """

    content_hash: bytes
    offset: int
    length: int


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
    prompt_tokens: int
    hit_device_tokens: int
    hit_host_tokens: int
    hit_store_tokens: int
    grants: int
    published_blocks: int
    evicted_device_blocks: int
    evicted_host_blocks: int
    dropped_blocks: int
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


def as_tokens(tokens: TokenIds) -> NDArray[np.int32]:
    """Convert token ids to a contiguous int32 array; such an array is not copied.

    Raises:
        UsageError: ``tokens`` is not one-dimensional, not integers, or has an id outside int32.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"tokens must be a flat sequence of int32 ids: {error}") from error
    if array.ndim != 1:
        raise UsageError(f"tokens has {array.ndim} dimensions; it must have one dimension")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise UsageError(f"tokens has dtype {array.dtype}; token ids must be integers")
    converted = array.astype(np.int32)
    same = converted == array
    if not same.all():
        position = int(same.argmin())
        raise UsageError(
            f"token id {array[position]} at position {position} is outside int32; it must be "
            "between -2147483648 and 2147483647"
        )
    return converted
