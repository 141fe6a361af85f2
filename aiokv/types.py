"""Small values that cross the public API."""

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
    """Where a lease is in its life; see :class:`Lease`."""

    MATCHED = "matched"  # it holds nothing; also after `preempt` without a swap
    WAITING = "waiting"  # in line for its salt's quota or for capacity
    GRANTED = "granted"  # it has a block table
    FAILED = "failed"  # granted, but an onload failed; `recompute_from` accepts that
    SWAPPING = "swapping"  # its table is moving to host memory
    SWAPPED = "swapped"  # its table is in host memory
    LOST = "lost"  # its blocks went with a rank; `resume` allocates anew
    RELEASED = "released"


class Hit(NamedTuple):
    """Cached tokens of a prompt by tier; the parts follow each other in this order."""

    device_tokens: int
    host_tokens: int

    @property
    def total(self) -> int:
        return self.device_tokens + self.host_tokens


class Item(NamedTuple):
    """A multimodal item of a prompt: an image, a stretch of audio or video.

    Its placeholder tokens say nothing of its content, so blocks that it touches are shared only
    with prompts that have the same item at the same place. Items are encoded whole: a match never
    ends inside one, but before it.

    Attributes:
        content_hash: of what is encoded, and how; equal hashes are taken for equal content.
        offset: its first position in the prompt.
        length: its positions.
    """

    content_hash: bytes
    offset: int
    length: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the engine was made, and the state of its pools now.

    Per pool, ``free + cached + leased + in_flight`` is the capacity: *leased* blocks belong to
    one lease alone, *cached* ones to the index (with or without leases on them), *in flight* ones
    are the destination of a transfer. State slots are free, a snapshot, or a lease's. *Releasing*
    leases are released, but a batch in flight computes with their blocks.
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
    nodes: int
    index_bytes: int
    token_bytes: int

    @property
    def hit_tokens(self) -> int:
        return self.hit_device_tokens + self.hit_host_tokens


def as_items(items: Sequence[Item]) -> list[Item]:
    """Return items, given as ``Item`` or tuples, with plain integers.

    Raises:
        UsageError: an item is not (bytes, int, int).
    """
    return [_as_item(item) for item in sequence("items", items)]


def _as_item(item: object) -> Item:
    if not isinstance(item, tuple) or len(item) != 3:
        raise UsageError(f"an item must be Item(content_hash, offset, length), not {item!r}")
    content_hash, offset, length = item
    if not isinstance(content_hash, bytes):
        raise UsageError(f"an item's content_hash must be bytes, not {content_hash!r}")
    return Item(
        content_hash, integer("an item's offset", offset), integer("an item's length", length)
    )


def as_priority(priority: object) -> int:
    """Return a priority as an int.

    Raises:
        UsageError: not an integer.
    """
    try:
        return operator.index(priority)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"priority is {priority!r}; it must be an integer (lower goes first)"
        ) from None


def as_tokens(tokens: TokenIds) -> NDArray[np.int32]:
    """Token ids as a contiguous int32 array; no copy when they are one already.

    Raises:
        UsageError: not one-dimensional, not integers, or an id outside int32.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"token ids must be a flat sequence of int32: {error}") from error
    if array.ndim != 1:
        raise UsageError(f"token ids must have one dimension, not {array.ndim}")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise UsageError(f"token ids must be integers, not {array.dtype}")
    converted = array.astype(np.int32)
    same = converted == array
    if not same.all():
        position = int(same.argmin())
        raise UsageError(f"token id {array[position]} at position {position} is outside int32")
    return converted
