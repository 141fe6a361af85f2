"""Argument and result types of the public API."""

from __future__ import annotations

import operator
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np

from aiokv._native import copy_ints
from aiokv.base.checks import integer, sequence
from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    TokenIds = NDArray[np.integer] | Sequence[int]
    LeaseIds = Sequence[int] | NDArray[np.int64]
    StepTokenIds = NDArray[np.integer] | Sequence[int] | Sequence[Sequence[int]]

Tier = Literal["device", "host"]

_ARRAY: Final = np.ndarray
_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)


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


class GroupHit(NamedTuple):
    """Cached blocks of one group besides attention that a hit uses, by tier.

    Attributes:
        device_blocks: blocks that the device had; 1 for a snapshot of recurrent state.
        host_blocks: blocks that were copied from host memory, because the device did not have them.
    """

    device_blocks: int
    host_blocks: int


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


LeaseWait = Literal["", "pending", "store", "quota", "capacity", "onload", "offload", "batch"]


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as ``Inspection.leases`` lists it.

    Attributes:
        lease_id: ``Lease.id``.
        owner: ``Lease.owner``; the id in hexadecimal without one.
        state: ``"released"`` if the lease is released but a batch in flight still uses its blocks.
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
    """Most used prefixes of the cache, as ``Inspection.hottest_prefixes`` returns them.

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
            store could not be opened or its operations fail. See ``engine.statistics().stores``.
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


def as_tokens(tokens: TokenIds, kind: str = "token", name: str = "tokens") -> NDArray[np.int32]:
    """Convert token ids to a contiguous int32 array; such an array is not copied.

    Args:
        tokens: ``[N]`` integers; a list and an int64 array are converted natively.
        kind: what an element is, for messages.
        name: name of the argument, for messages.

    Raises:
        UsageError: ``tokens`` is not one-dimensional, not integers, or has an id outside int32.
    """
    if type(tokens) is _ARRAY and tokens.ndim == 1:
        if tokens.dtype is _INT32:
            if tokens.flags.c_contiguous:
                return tokens  # type: ignore[return-value]  # is int32: see above
            return np.ascontiguousarray(tokens, _INT32)
        if tokens.dtype is _INT64:
            array = np.empty(len(tokens), _INT32)
            if copy_ints(np.ascontiguousarray(tokens), array) == len(tokens):
                return array
    elif type(tokens) is list:
        array = np.empty(len(tokens), _INT32)
        if copy_ints(tokens, array) == len(tokens):
            return array
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{name} must be a flat sequence of int32 ids: {error}") from error
    if array.ndim == 0:
        raise UsageError(
            f"{name} is a {type(tokens).__name__}; it must be a sequence of {kind} ids",
            hint="encode the text with the tokenizer" if isinstance(tokens, str | bytes) else "",
        )
    if array.ndim != 1:
        raise UsageError(f"{name} has {array.ndim} dimensions; it must have one dimension")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype == _INT32:
        return np.ascontiguousarray(array)
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


def as_block_ids(block_ids: TokenIds) -> NDArray[np.int32]:
    """Convert block ids to a contiguous int32 array; such an array is not copied.

    Raises:
        UsageError: as for ``as_tokens``.
    """
    return as_tokens(block_ids, "block", "block_ids")


class StepTokens(NamedTuple):
    """Tokens of a step, one row per lease.

    Attributes:
        tokens: ``[rows * width]`` int32, row by row.
        width: tokens per row.
        counts: ``[rows]`` int32, leading tokens of each row that count; None for all.
    """

    tokens: NDArray[np.int32]
    width: int
    counts: NDArray[np.int32] | None

    def of_rows(self, rows: list[int]) -> StepTokens:
        """Return the tokens of some rows."""
        tokens = self.tokens.reshape(-1, self.width)[rows].ravel()
        return StepTokens(tokens, self.width, None if self.counts is None else self.counts[rows])


def as_step_tokens(
    tokens: StepTokenIds, counts: TokenIds | None, rows: int, ended: Sequence[int] = ()
) -> StepTokens:
    """Convert the tokens of a step.

    Args:
        tokens: ``[rows]`` ids, ``[rows, K]`` ids, or a list of lists.
        counts: ``[rows]`` leading tokens of each row that count; None for all, and for a list of
            lists.
        rows: number of leases.
        ended: rows of which no token counts.

    Raises:
        UsageError: the shape is another one, or an element is not an integer of int32.
    """
    numbers = None if counts is None else as_tokens(counts, "count", "counts")
    width = 1
    if type(tokens) is _ARRAY and tokens.ndim == 1:  # the usual case
        flat = as_tokens(tokens)
        given = len(flat)
    elif isinstance(tokens, list | tuple) and tokens and isinstance(tokens[0], list | tuple):
        if counts is not None:
            raise UsageError("advance: counts must be None when tokens is a list of lists")
        flat, width, numbers = _as_padded(tokens)
        given = len(numbers)
    else:
        table = tokens if isinstance(tokens, list) else np.asarray(tokens)
        if isinstance(table, np.ndarray) and table.ndim == 2:
            given, width = table.shape
            flat = as_tokens(table.ravel())
        else:
            flat = as_tokens(table)
            given = len(flat)
    if given != rows:
        raise _wrong_length(f"tokens has {given} rows", rows)
    if numbers is not None and len(numbers) != rows:
        raise _wrong_length(f"counts has {len(numbers)} numbers", rows)
    if ended:
        numbers = np.full(rows, width, np.int32) if numbers is None else numbers.copy()
        numbers[ended] = 0
    return StepTokens(flat, width, numbers)


def _wrong_length(found: str, rows: int) -> UsageError:
    return UsageError(
        f"advance: {found}; it must have {rows}, one per lease of the step",
        hint="keep the rows of leases that were released or removed during the step",
    )


def _as_padded(lists: Sequence[Any]) -> tuple[NDArray[np.int32], int, NDArray[np.int32]]:
    counts = np.fromiter((len(row) for row in lists), np.int32, len(lists))
    width = int(counts.max())
    padded = np.zeros((len(lists), width), np.int32)
    flat = as_tokens(list(chain.from_iterable(lists)))
    padded[np.arange(width) < counts[:, None]] = flat
    return padded.ravel(), width, counts
