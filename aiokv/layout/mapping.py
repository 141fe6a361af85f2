"""Mapping of blocks between two servers whose layouts may differ.

A *fragment* is what one sender rank sends of one of its blocks to one receiver rank: the heads that
both have, all tokens of the block, in the sender's order of axes; pieces by layer and then by the
sender's regions, each aligned to 64 bytes. The sender cuts fragments out of its host blocks; the
receiver places them in its own. Blocks count positions from the begin of the prompt on both sides::

    sender, 48 tokens per block     |       0       |       1       |
    receiver, 32 tokens per block   |    0    |    1    |    2    |
                                         fragment 1 has tokens of the receiver's blocks 1 and 2
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from aiokv._native import Repack
from aiokv.base import checks
from aiokv.errors import LayoutError, UsageError
from aiokv.layout.axes import HEADS, TOKENS
from aiokv.layout.block_layout import BLOCKS, STATE, PieceLayout
from aiokv.layout.block_layout import BlockLayout as BlockLayout
from aiokv.layout.host_block import aligned

if TYPE_CHECKING:
    import collections.abc
    from collections.abc import Iterable, Iterator, Sequence

_Axis: TypeAlias = tuple[int, int, int]  # length, source stride, target stride
_Rows: TypeAlias = tuple[int, int, int, int]  # length, inner length, outer and inner stride
_NO_ROWS: Final[_Rows] = (0, 0, 0, 0)


class BlockMapping:
    """Copies of blocks of one sender rank to blocks of one receiver rank. Immutable, thread-safe.

    Args:
        sender: layout of the rank that sends.
        receiver: layout of the rank that receives.
        pool: ``"blocks"``; ``"state"`` for slots of recurrent state, each of which is one block;
            ``"window NAME"`` for blocks of a group of sliding-window layers.
        layers: first and end of the layers in a fragment; None for all. The sender cuts fragments
            out of host blocks with these layers only; the receiver places them in its whole host
            blocks, unless ``is_identity``.

    Attributes:
        fragment_bytes: bytes of a fragment; 0 if the two ranks have no heads in common.
        is_identity: a fragment is the sender's host block as it is, and the receiver's.
        fragment_is_block: a fragment is the sender's host block as it is: nothing has to be cut.

    Raises:
        LayoutError: blocks of one side cannot become blocks of the other one; names both sides and
            their values.
        UsageError: neither side has such a pool.
    """

    def __init__(
        self,
        sender: BlockLayout,
        receiver: BlockLayout,
        pool: str = BLOCKS,
        layers: tuple[int, int] | None = None,
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.pool = pool
        # A slot of recurrent state has no positions, and is one block on both sides.
        self._sender_tokens = 1 if pool == STATE else sender.block_tokens
        self._receiver_tokens = 1 if pool == STATE else receiver.block_tokens
        first, end = layers or (0, sender.pool(pool).num_layers)
        sent, kept = _Span.of(sender, pool, first, end), _Span.of(receiver, pool, first, end)
        boxes = [
            box._replace(source=box.source - sent.offset)
            for box in _boxes(sender, receiver, pool)
            if first <= box.layer < end
        ]
        sender_bytes = sent.num_bytes
        receiver_bytes = receiver.pool(pool).payload_bytes
        num_pieces = sent.num_pieces
        self.fragment_bytes = sum(aligned(box.copy.num_bytes) for box in boxes)
        self.fragment_is_block = len(boxes) == num_pieces and all(
            box.copy.is_whole for box in boxes
        )
        self.is_identity = (
            self.fragment_is_block
            and self._sender_tokens == self._receiver_tokens
            and all(box.copy.is_equal and box.source == box.target - kept.offset for box in boxes)
        )
        cutting, placing = _Program(), _Program()
        if self.fragment_is_block:
            cutting.add_whole(sender_bytes)
        else:
            cutting.add_cuts(boxes)
        if self.is_identity and layers is None:
            placing.add_whole(sender_bytes)
        else:
            placing.add_places(boxes)
        self._cut = cutting.compiled(sender_bytes, self.fragment_bytes)
        self._place = placing.compiled(self.fragment_bytes, receiver_bytes)

    def receiver_blocks(self, sender_block: int) -> range:
        """Return the indices of the receiver's blocks that have tokens of a sender's block."""
        return _overlapping(sender_block, self._sender_tokens, self._receiver_tokens)

    def sender_blocks(self, receiver_block: int) -> range:
        """Return the indices of the sender's blocks that have tokens of a receiver's block.

        A receiver's block is complete when the fragments of all of them have been placed, from
        every rank of ``sources``; blocks behind the last token of the prompt do not exist.
        """
        return _overlapping(receiver_block, self._receiver_tokens, self._sender_tokens)

    def cut(
        self, block_addresses: int | Sequence[int], fragment_addresses: int | Sequence[int]
    ) -> None:
        """Cut one fragment out of each host block of the sender. Call it in a thread.

        The GIL is released while bytes are copied. The bytes between the pieces of a fragment are
        zero, unless the fragment is the block as it is.

        Args:
            block_addresses: addresses of the host blocks.
            fragment_addresses: where the fragments go; ``fragment_bytes`` each. They do not overlap
                any of the blocks.

        Raises:
            UsageError: other numbers of blocks than of fragments. No address is checked.
        """
        blocks, fragments = _integers(block_addresses), _integers(fragment_addresses)
        if len(blocks) != len(fragments):
            raise UsageError(
                f"cut: {len(blocks)} blocks and {len(fragments)} fragments; pass one fragment "
                "per block"
            )
        tokens = self._sender_tokens
        _run(self._cut, [(b, p, 0, 0, tokens) for b, p in zip(blocks, fragments, strict=True)])

    def place(
        self,
        fragment_addresses: int | Sequence[int],
        sender_blocks: int | Sequence[int],
        receiver_addresses: collections.abc.Mapping[int, int],
    ) -> None:
        """Write the tokens of fragments to the receiver's host blocks. Call it in a thread.

        The GIL is released while bytes are copied. Other bytes of the host blocks do not change, so
        fragments of several ranks and of neighbouring blocks may be placed at the same time.

        Args:
            fragment_addresses: addresses of the fragments.
            sender_blocks: index of the sender's block of each fragment.
            receiver_addresses: addresses of the host blocks by the index of the receiver's block;
                tokens of other blocks are left out.

        Raises:
            UsageError: other numbers of fragments than of blocks. No address is checked.
        """
        fragments, blocks = _integers(fragment_addresses), _integers(sender_blocks)
        if len(fragments) != len(blocks):
            raise UsageError(
                f"place: {len(fragments)} fragments and {len(blocks)} sender blocks; pass one "
                "block per fragment"
            )
        sent, kept = self._sender_tokens, self._receiver_tokens
        parts = []
        for fragment, block in zip(fragments, blocks, strict=True):
            for index in self.receiver_blocks(block):
                if (address := receiver_addresses.get(index)) is not None:
                    begin = max(block * sent, index * kept)
                    end = min((block + 1) * sent, (index + 1) * kept)
                    first = (begin - block * sent, begin - index * kept)
                    parts.append((fragment, address, *first, end - begin))
        _run(self._place, parts)


def sources(senders: Sequence[BlockLayout], receiver: BlockLayout) -> list[int]:
    """Return the ranks that send to one rank of the receiver, in ascending order.

    Among sender ranks with equal heads, one sends to this receiver. Receivers that need the same
    heads get different senders.

    Args:
        senders: layouts of all ranks of the sender.
        receiver: layout of the receiver's rank.

    Raises:
        LayoutError: layouts do not fit each other, or a head of the receiver is on no rank.
        UsageError: not one layout of each rank.
    """
    num_ranks = len(senders)
    by_rank = {layout.rank: layout for layout in senders}
    complete = sorted(by_rank) == list(range(num_ranks)) and bool(senders)
    if not complete or any(layout.num_ranks != num_ranks for layout in senders):
        ranks = [f"{layout.rank} of {layout.num_ranks}" for layout in senders]
        raise UsageError(f"sources: the layouts are of the ranks {ranks}; pass one of each rank")
    missing = _Missing(receiver)
    chosen = []
    first = receiver.rank * num_ranks // receiver.num_ranks
    for i in range(num_ranks):
        rank = (first + i) % num_ranks
        if missing.remove(by_rank[rank]):
            chosen.append(rank)
    if missing:
        raise LayoutError(
            f"no rank of the sender has {missing}, which {_side('receiver', receiver)} has",
            hint="check heads= of Regions.add on all ranks of both servers",
        )
    return sorted(chosen)


def covers(senders: Iterable[BlockLayout], receiver: BlockLayout) -> bool:
    """Return True if these ranks together have all heads of one rank of the receiver.

    Raises:
        LayoutError: layouts do not fit each other.
    """
    missing = _Missing(receiver)
    for sender in senders:
        missing.remove(sender)
    return not missing


class _Missing:
    """Shares of the receiver's pieces that no sender has yet."""

    def __init__(self, receiver: BlockLayout) -> None:
        self._receiver = receiver
        # (pool, layer, region): disjoint intervals of heads
        self._intervals = {
            (pool, layer, piece.region): [_share(piece, receiver)[:2]]
            for pool, layout in receiver.pools
            for layer, pieces in enumerate(layout.layers())
            for piece in pieces
        }

    def __bool__(self) -> bool:
        return any(self._intervals.values())

    def __str__(self) -> str:
        for (pool, layer, region), intervals in self._intervals.items():
            for begin, end in intervals:
                heads = f"heads {begin} to {end - 1}" if end - begin > 1 else f"head {begin}"
                return f"{heads} of {_place(pool, layer, region)}"
        return "nothing"

    def remove(self, sender: BlockLayout) -> bool:
        """Remove the shares of one sender; return True if any was missing."""
        found = False
        for pool in self._receiver.pool_names:
            for layer, piece, _ in _pairs(sender, self._receiver, pool):
                begin, end, _ = _share(piece, sender)
                key = (pool, layer, piece.region)
                before = self._intervals[key]
                after = [
                    part
                    for low, high in before
                    for part in ((low, min(high, begin)), (max(low, end), high))
                    if part[0] < part[1]
                ]
                found = found or after != before
                self._intervals[key] = after
        return found


class _Copy(NamedTuple):
    """Copies of one piece: sender's host block to fragment to receiver's host block."""

    num_bytes: int  # in the fragment
    source_shift: int  # offset of the common heads in the sender's piece
    target_shift: int  # offset of the common heads in the receiver's piece
    cut: _Geometry
    place: _Geometry
    is_whole: bool  # the fragment is the sender's whole piece
    is_equal: bool  # the receiver's piece is equal to the sender's


class _Box(NamedTuple):
    """One piece of a fragment, and its places in the host blocks of both sides."""

    layer: int
    source: int
    target: int
    copy: _Copy


class _Geometry(NamedTuple):
    """Strides of a copy, in bytes; a group of ``_native.Repack`` without its pieces."""

    item_bytes: int
    axes: tuple[_Axis, ...] = ()
    row_tokens: int = 0
    source_rows: _Rows = _NO_ROWS
    target_rows: _Rows = _NO_ROWS


class _Span(NamedTuple):
    """Some consecutive layers in the host blocks of one side."""

    offset: int
    num_bytes: int
    num_pieces: int

    @classmethod
    def of(cls, layout: BlockLayout, pool: str, first: int, end: int) -> _Span:
        """Return the place of layers ``first`` to ``end - 1``."""
        sizes = [
            [aligned(piece.num_bytes) for piece in pieces] for pieces in layout.pool(pool).layers()
        ]
        inside = sizes[first:end]
        return cls(sum(map(sum, sizes[:first])), sum(map(sum, inside)), sum(map(len, inside)))


class _Program:
    """Collects the copies of a mapping by their geometry."""

    def __init__(self) -> None:
        self._pieces: defaultdict[_Geometry, list[tuple[int, int]]] = defaultdict(list)
        self._gaps: list[tuple[int, int]] = []

    def add_whole(self, num_bytes: int) -> None:
        self._pieces[_Geometry(num_bytes)].append((0, 0))

    def add_cuts(self, boxes: Iterable[_Box]) -> None:
        for fragment, box in _in_fragment(boxes):
            self._pieces[box.copy.cut].append((box.source, fragment))
            end = fragment + box.copy.num_bytes
            if gap := aligned(end) - end:
                self._gaps.append((end, gap))

    def add_places(self, boxes: Iterable[_Box]) -> None:
        for fragment, box in _in_fragment(boxes):
            self._pieces[box.copy.place].append((fragment, box.target))

    def compiled(self, source_bytes: int, target_bytes: int) -> Repack:
        groups = [(*geometry, pieces) for geometry, pieces in self._pieces.items()]
        return Repack(groups, self._gaps, source_bytes=source_bytes, target_bytes=target_bytes)


def _in_fragment(boxes: Iterable[_Box]) -> Iterator[tuple[int, _Box]]:
    offset = 0
    for box in boxes:
        yield offset, box
        offset += aligned(box.copy.num_bytes)


def _boxes(sender: BlockLayout, receiver: BlockLayout, pool: str) -> Iterator[_Box]:
    """Iterate over the pieces of a fragment, in its order."""
    copies: dict[tuple[PieceLayout, PieceLayout], _Copy | None] = {}
    targets = {(layer, region): offset for layer, region, offset in _places(receiver, pool)}
    sent = _pairs(sender, receiver, pool)
    for (layer, source, target), (_, region, offset) in zip(
        sent, _places(sender, pool), strict=True
    ):
        pair = (source, target)
        if pair not in copies:
            copies[pair] = _copy(source, target, sender, receiver)
        if (copy := copies[pair]) is not None:
            place = targets[layer, region]
            yield _Box(layer, offset + copy.source_shift, place + copy.target_shift, copy)


def _places(layout: BlockLayout, pool: str) -> Iterator[tuple[int, str, int]]:
    """Iterate over (layer, region, offset in the host block)."""
    offset = 0
    for layer, pieces in enumerate(layout.pool(pool).layers()):
        for piece in pieces:
            yield layer, piece.region, offset
            offset += aligned(piece.num_bytes)


def _pairs(
    sender: BlockLayout, receiver: BlockLayout, pool: str
) -> Iterator[tuple[int, PieceLayout, PieceLayout]]:
    """Iterate over (layer, sender's piece, receiver's piece) in the sender's order.

    Raises:
        LayoutError: they do not fit each other.
    """
    sides = _Sides(sender, receiver)
    sides.require_equal("pools", sender.pool_names, receiver.pool_names)
    ours, theirs = sender.pool(pool), receiver.pool(pool)
    sides.require_equal(f"layers of {pool}", ours.num_layers, theirs.num_layers)
    checked = set()
    for layer, (source, target) in enumerate(zip(ours.layers(), theirs.layers(), strict=True)):
        by_name = {piece.region: piece for piece in target}
        if (source, target) not in checked:
            names = sorted(piece.region for piece in source)
            sides.require_equal(f"regions in {_layer(pool, layer)}", names, sorted(by_name))
            for piece in source:
                what = _place(pool, layer, piece.region)
                sides.check_pair(what, pool, piece, by_name[piece.region])
            checked.add((source, target))
        for piece in source:
            yield layer, piece, by_name[piece.region]


class _Sides:
    """Two layouts, for messages that name both."""

    def __init__(self, sender: BlockLayout, receiver: BlockLayout) -> None:
        self._sender = sender
        self._receiver = receiver

    def require_equal(self, what: str, ours: object, theirs: object, hint: str = "") -> None:
        if ours != theirs:
            raise LayoutError(
                f"peers: {what}: {_side('sender', self._sender)} has {checks.shown(ours)}, "
                f"{_side('receiver', self._receiver)} has {checks.shown(theirs)}",
                hint=hint,
            )

    def check_pair(self, what: str, pool: str, ours: PieceLayout, theirs: PieceLayout) -> None:
        """Raise LayoutError unless bytes of one piece can become bytes of the other."""
        self.require_equal(
            f"dtype of {what}", (ours.dtype, ours.item_bytes), (theirs.dtype, theirs.item_bytes)
        )
        if ours.axes is None or theirs.axes is None:
            hint = "name the axes on both servers: Regions.add(axes=, heads=)"
            self.require_equal(f"axes of {what}", ours.axes, theirs.axes, hint)
            self.require_equal(f"shape of {what}", ours.shape, theirs.shape, hint)
            ranks = (self._sender.num_ranks, self._receiver.num_ranks)
            self.require_equal(f"number of ranks ({what} has no axes)", *ranks, hint)
        else:
            lengths = (_fixed_lengths(ours), _fixed_lengths(theirs))
            self.require_equal(f"lengths of the axes of {what}", *lengths)
            if ours.heads is not None and theirs.heads is not None:
                hint = "pass heads= to Regions.add where several ranks have the same heads"
                self.require_equal(f"all heads of {what}", ours.heads[1], theirs.heads[1], hint)
        if pool != STATE:
            self._check_tokens(what, ours, theirs)

    def _check_tokens(self, what: str, ours: PieceLayout, theirs: PieceLayout) -> None:
        tokens = (self._sender.block_tokens, self._receiver.block_tokens)
        if ours.rows is None or theirs.rows is None:
            self.require_equal(
                f"block_tokens ({what} has no axis {TOKENS!r})",
                *tokens,
                f"use the same block_tokens, or name the axis {TOKENS!r}: Regions.add(axes=)",
            )
        else:
            self.require_equal(
                f"positions per row of {what}", tokens[0] // ours.rows, tokens[1] // theirs.rows
            )


def _fixed_lengths(piece: PieceLayout) -> dict[str, int | str]:
    """Return the lengths of the axes that must be equal, and the names of the others."""
    pairs = sorted(zip(piece.axes or (), piece.shape, strict=True))
    return {name: "any" if name in (TOKENS, HEADS) else length for name, length in pairs}


def _copy(
    source: PieceLayout, target: PieceLayout, sender: BlockLayout, receiver: BlockLayout
) -> _Copy | None:
    """Return the copies of a piece; None if the two ranks have nothing of it in common."""
    begin, end, _ = _share(source, sender)
    other_begin, other_end, _ = _share(target, receiver)
    low, high = max(begin, other_begin), min(end, other_end)
    if low >= high:
        return None
    if source.axes is None or target.axes is None:
        whole = _Geometry(source.num_bytes)
        return _Copy(source.num_bytes, 0, 0, whole, whole, is_whole=True, is_equal=True)
    heads = high - low
    axes = source.axes
    shape = tuple(
        heads if name == HEADS else length for name, length in zip(axes, source.shape, strict=True)
    )
    ours = _Strides(axes, source.shape, source.item_bytes)
    sent = _Strides(axes, shape, source.item_bytes)
    theirs = _Strides(target.axes, target.shape, target.item_bytes)
    rows = source.rows
    row_tokens = 0 if rows is None else sender.block_tokens // rows
    return _Copy(
        num_bytes=sent.num_bytes,
        source_shift=(low - begin) * ours.heads,
        target_shift=(low - other_begin) * theirs.heads,
        cut=sent.geometry(ours, sent, row_tokens),
        place=sent.geometry(sent, theirs, row_tokens),
        is_whole=shape == source.shape,
        is_equal=(axes, shape) == (target.axes, target.shape),
    )


class _Strides:
    """Strides of a C-contiguous piece, in bytes."""

    def __init__(self, axes: tuple[str, ...], shape: tuple[int, ...], item_bytes: int) -> None:
        self._item_bytes = item_bytes
        self._lengths: dict[str, int] = {}
        self._strides: dict[str, int] = {}
        self._rows: _Rows = _NO_ROWS
        stride = item_bytes
        for name, length in zip(reversed(axes), reversed(shape), strict=True):
            if name != TOKENS:
                self._lengths[name] = length
                self._strides[name] = stride
            else:
                self._rows = _with_outer_rows(self._rows, length, stride)
            stride *= length
        self.num_bytes = stride

    @property
    def heads(self) -> int:
        """Bytes from one head to the next; 0 without heads."""
        return self._strides.get(HEADS, 0)

    def geometry(self, source: _Strides, target: _Strides, row_tokens: int) -> _Geometry:
        """Return the copy of all elements of this shape."""
        return _Geometry(
            self._item_bytes,
            tuple(source.axis(name, length, target) for name, length in self._lengths.items()),
            row_tokens,
            source.rows,
            target.rows,
        )

    def axis(self, name: str, length: int, target: _Strides) -> _Axis:
        """Return an axis of a copy from this piece to another one."""
        return (length, self._strides[name], target.stride(name))

    def stride(self, name: str) -> int:
        """Return the stride of an axis."""
        return self._strides[name]

    @property
    def rows(self) -> _Rows:
        """Places of the rows of tokens."""
        return self._rows


def _with_outer_rows(inner: _Rows, length: int, stride: int) -> _Rows:
    """Return rows with one more axis of tokens around them."""
    if inner == _NO_ROWS:
        return (length, length, 0, stride)
    rows, _, _, inner_stride = inner
    if stride == rows * inner_stride:  # equally far apart
        return (length * rows, length * rows, 0, inner_stride)
    return (length * rows, rows, stride, inner_stride)


def _share(piece: PieceLayout, layout: BlockLayout) -> tuple[int, int, int]:
    """Return the share of a piece that a rank has, as (begin, end, total).

    Heads are counted; without an axis of heads, all ranks have the whole; without axes, each rank
    has a part of its own.
    """
    if piece.axes is None:
        return layout.rank, layout.rank + 1, layout.num_ranks
    if piece.heads is None:
        return 0, 1, 1
    first, total = piece.heads
    return first, first + piece.shape[piece.axes.index(HEADS)], total


def _overlapping(block: int, block_tokens: int, other_tokens: int) -> range:
    begin, end = block * block_tokens, (block + 1) * block_tokens
    return range(begin // other_tokens, -(-end // other_tokens))


def _run(repack: Repack, parts: list[tuple[int, int, int, int, int]]) -> None:
    repack.run(np.array(parts, dtype=np.int64).reshape(len(parts), 5))


def _integers(values: int | Sequence[int]) -> Sequence[int]:
    return [int(values)] if isinstance(values, int | np.integer) else values


def _side(name: str, layout: BlockLayout) -> str:
    return f"the {name} (rank {layout.rank} of {layout.num_ranks})"


def _layer(pool: str, layer: int) -> str:
    return f"layer {layer}" if pool == BLOCKS else f"layer {layer} of {pool}"


def _place(pool: str, layer: int, region: str) -> str:
    return f"region {region!r} in {_layer(pool, layer)}"
