"""Description of the blocks of one rank, which servers exchange before they exchange blocks.

A *pool* is a set of regions whose host blocks have one layout: the blocks of the cache, the slots
of recurrent state, the blocks of a group of sliding-window layers. Within a host block, the pieces
follow each other by layer and then by region, each aligned to 64 bytes.

Layers with equal pieces are written once: a pool is a table of kinds of layers, and runs of layers
of one kind. Each layout has one encoding, so equal layouts are equal bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from aiokv.base import checks
from aiokv.errors import AiokvError, ConfigError, LayoutError, UsageError
from aiokv.layout.axes import HEADS, MAX_AXES, TOKENS, check_axes
from aiokv.layout.host_block import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from aiokv.layout.arrays import Piece
    from aiokv.layout.regions import Regions

FORMAT_VERSION: Final = 1
# Several layouts, one per rank, fit in a ticket of 64 KiB.
MAX_ENCODED_BYTES: Final = 16 << 10
MAX_LAYERS: Final = 4096
MAX_PIECES_PER_LAYER: Final = 64
MAX_PIECES: Final = 16384  # over all layers and pools; bounds time and memory of a mapping
MAX_WINDOWS: Final = 16
MAX_POOLS: Final = 2 + MAX_WINDOWS  # blocks, recurrent state, groups of sliding-window layers
MAX_BLOCK_BYTES: Final = 1 << 40

BLOCKS: Final = "blocks"
STATE: Final = "state"

_Name: TypeAlias = Annotated[str, Meta(max_length=256)]
_Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=checks.MAX_INT32)]
_Index: TypeAlias = Annotated[int, Meta(ge=0, le=checks.MAX_INT32)]


class PieceLayout(msgspec.Struct, frozen=True, array_like=True):
    """One region in one layer.

    Attributes:
        region: name of the region.
        dtype: name of the element type.
        item_bytes: bytes of an element.
        shape: axes of a block, outermost first, in elements.
        axes: their names; None if the caller named none.
        heads: (first global head of this rank, heads of all ranks together) of an axis of heads;
            None without one.
    """

    region: _Name
    dtype: _Name
    item_bytes: _Size
    shape: Annotated[tuple[_Size, ...], Meta(max_length=32)]
    axes: Annotated[tuple[_Name, ...], Meta(max_length=MAX_AXES)] | None
    heads: tuple[_Index, _Count] | None

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return self.item_bytes * math.prod(self.shape)

    @property
    def rows(self) -> int | None:
        """Rows of tokens in a block; None without an axis of tokens."""
        if self.axes is None or TOKENS not in self.axes:
            return None
        pairs = zip(self.axes, self.shape, strict=True)
        return math.prod(length for name, length in pairs if name == TOKENS)


Kind: TypeAlias = Annotated[tuple[PieceLayout, ...], Meta(max_length=MAX_PIECES_PER_LAYER)]


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    """The layers of a pool.

    Attributes:
        kinds: different layers, in order of their first use: the pieces of each.
        runs: (index of the kind, number of consecutive layers).
    """

    kinds: Annotated[tuple[Kind, ...], Meta(max_length=MAX_LAYERS)]
    runs: Annotated[tuple[tuple[_Index, _Count], ...], Meta(max_length=MAX_LAYERS)]

    @property
    def num_layers(self) -> int:
        """Layers of the model, those without pieces included."""
        return sum(count for _, count in self.runs)

    @property
    def num_pieces(self) -> int:
        """Pieces of all layers."""
        return sum(len(self.kinds[kind]) * count for kind, count in self.runs)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block as peers exchange it, with the alignment of its pieces."""
        sizes = [payload_bytes(piece.num_bytes for piece in kind) for kind in self.kinds]
        return sum(sizes[kind] * count for kind, count in self.runs)

    def ranges(self, num_ranges: int) -> list[tuple[int, int]]:
        """Return the ranges of layers of :func:`split_layers`."""
        return split_layers([bool(pieces) for pieces in self.layers()], num_ranges)

    def layers(self) -> Iterator[tuple[PieceLayout, ...]]:
        """Iterate over the pieces of each layer."""
        for kind, count in self.runs:
            for _ in range(count):
                yield self.kinds[kind]


class BlockLayout(msgspec.Struct, frozen=True, array_like=True):
    """Layout of the blocks of one rank.

    Attributes:
        version: version of this format.
        block_tokens: token positions per block.
        rank: number of the rank.
        num_ranks: ranks of its server.
        pools: (name, layout): ``"blocks"``; then ``"state"``, if there is recurrent state; then
            ``"window NAME"`` of each group of sliding-window layers, by name.
    """

    version: int
    block_tokens: _Count
    rank: _Index
    num_ranks: _Count
    pools: Annotated[tuple[tuple[_Name, PoolLayout], ...], Meta(max_length=MAX_POOLS)]

    @classmethod
    def of(
        cls,
        regions: Regions,
        block_tokens: int,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        windows: Mapping[str, Regions] | None = None,
    ) -> BlockLayout:
        """Return the layout of a rank's blocks.

        Args:
            regions: the tensors of the rank, its recurrent state included.
            block_tokens: token positions per block.
            rank: number of the rank.
            num_ranks: ranks of its server.
            windows: the tensors of groups of sliding-window layers, by the name of the group.

        Raises:
            LayoutError: the axes of a region do not fit ``block_tokens`` or the number of ranks, or
                the layers differ so much that the description is longer than 16 KiB.
            ConfigError: a number is out of range.
        """
        limit = checks.MAX_INT32
        checks.integer("block_tokens", block_tokens, minimum=1, maximum=limit, error=ConfigError)
        checks.integer("num_ranks", num_ranks, minimum=1, maximum=limit, error=ConfigError)
        checks.integer("rank", rank, minimum=0, maximum=num_ranks - 1, error=ConfigError)
        pools = [(BLOCKS, _pool(regions, rank, num_ranks))]
        if regions.state_pieces:
            pools.append((STATE, _pool(regions.state_blocks(), rank, num_ranks)))
        for name, group in sorted((windows or {}).items()):
            checks.text("the name of a window", name, LayoutError)
            pools.append((window_pool(name), _pool(group, rank, num_ranks)))
        layout = cls(FORMAT_VERSION, block_tokens, rank, num_ranks, tuple(pools))
        _check(layout, LayoutError)
        blob = layout.encode()
        if len(blob) > MAX_ENCODED_BYTES:
            raise LayoutError(
                f"the description of the blocks takes {len(blob)} bytes; at most "
                f"{MAX_ENCODED_BYTES}",
                hint="layers with the same regions, shapes, dtypes, axes and heads take no "
                "additional bytes",
            )
        return layout

    def encode(self) -> bytes:
        """Return the bytes of the layout; equal layouts have equal bytes."""
        return _encoder.encode(self)

    @staticmethod
    def decode(blob: bytes) -> BlockLayout:
        """Return the layout of ``encode()``; the time and memory are bounded for any bytes.

        Raises:
            UsageError: not the encoding of a layout.
        """
        if len(blob) > MAX_ENCODED_BYTES:
            raise UsageError(
                f"layout: {len(blob)} bytes; a layout has at most {MAX_ENCODED_BYTES} bytes"
            )
        try:
            layout = _decoder.decode(blob)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"layout: {len(blob)} bytes that are not a layout: {error}") from None
        if layout.version != FORMAT_VERSION:
            raise UsageError(
                f"layout: version {layout.version}; this server has version {FORMAT_VERSION}",
                hint="run the same version of aiokv on both servers",
            )
        _check(layout, UsageError)
        if layout.encode() != blob:
            raise UsageError("layout: the bytes differ from the canonical encoding of this layout")
        return layout

    def pool(self, name: str = BLOCKS) -> PoolLayout:
        """Return the layout of a pool.

        Raises:
            UsageError: there is no such pool.
        """
        for own, pool in self.pools:
            if own == name:
                return pool
        raise UsageError(
            f"pool is {checks.shown(name)}; the layout has {', '.join(map(repr, self.pool_names))}"
        )

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the pools."""
        return tuple(name for name, _ in self.pools)


def split_layers(has_pieces: Sequence[bool], num_ranges: int) -> list[tuple[int, int]]:
    """Divide the layers of a pool into ranges with tensors in each.

    Args:
        has_pieces: for each layer, True if it has tensors of the pool.
        num_ranges: wanted; at most one per layer with tensors is made.

    Returns:
        First and end of each range. The first range begins at layer 0, the last one ends behind the
        last layer.
    """
    with_pieces = [layer for layer, has in enumerate(has_pieces) if has]
    num_ranges = max(min(num_ranges, len(with_pieces)), 1)
    ends = [
        with_pieces[(i + 1) * len(with_pieces) // num_ranges - 1] + 1 for i in range(num_ranges - 1)
    ]
    return list(zip([0, *ends], [*ends, len(has_pieces)], strict=True))


def window_pool(name: str) -> str:
    """Return the name of the pool of a group of sliding-window layers."""
    return f"window {name}"


def _pool(regions: Regions, rank: int, num_ranks: int) -> PoolLayout:
    kinds: dict[tuple[PieceLayout, ...], int] = {}
    runs: list[tuple[int, int]] = []
    for layer in range(regions.num_layers):
        pieces = tuple(_piece(piece, rank, num_ranks) for piece in regions.layer_pieces(layer))
        kind = kinds.setdefault(pieces, len(kinds))
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return PoolLayout(tuple(kinds), tuple(runs))


def _piece(piece: Piece, rank: int, num_ranks: int) -> PieceLayout:
    checks.text("the name of a region", piece.region, LayoutError)
    checks.text("dtype", piece.dtype, LayoutError)
    heads = piece.heads
    if heads is None and piece.axes is not None and HEADS in piece.axes:
        own = piece.shape[piece.axes.index(HEADS)]
        heads = (rank * own, num_ranks * own)
    item_bytes = piece.block_bytes // math.prod(piece.shape)
    return PieceLayout(piece.region, piece.dtype, item_bytes, piece.shape, piece.axes, heads)


def _check(layout: BlockLayout, error: type[AiokvError]) -> None:
    """Raise an error of the class unless all numbers and names fit each other."""
    if layout.rank >= layout.num_ranks:
        raise error(f"layout: rank {layout.rank} of {layout.num_ranks} ranks")
    names = layout.pool_names
    windows = names[2:] if names[1:2] == (STATE,) else names[1:]
    if (
        names[:1] != (BLOCKS,)
        or list(windows) != sorted(set(windows))
        or not all(name.startswith(window_pool("")) for name in windows)
        or len(windows) > MAX_WINDOWS
    ):
        raise error(
            f"layout: the pools are {names}; expected {BLOCKS!r}, then {STATE!r} if there is any, "
            f"then at most {MAX_WINDOWS} groups of sliding-window layers by name"
        )
    for name, pool in layout.pools:
        _check_pool(name, pool, layout.block_tokens, error)
    num_pieces = sum(pool.num_pieces for _, pool in layout.pools)
    if num_pieces > MAX_PIECES:
        raise error(f"layout: {num_pieces} pieces; at most {MAX_PIECES}")


def _check_pool(name: str, pool: PoolLayout, block_tokens: int, error: type[AiokvError]) -> None:
    if pool.num_layers > MAX_LAYERS:
        raise error(f"layout: {name} has {pool.num_layers} layers; at most {MAX_LAYERS}")
    first_uses = list(dict.fromkeys(kind for kind, _ in pool.runs))
    if first_uses != list(range(len(pool.kinds))) or len(set(pool.kinds)) != len(pool.kinds):
        raise error(f"layout: the kinds of layers of {name} are not numbered by their first use")
    if any(a == b for (a, _), (b, _) in zip(pool.runs, pool.runs[1:], strict=False)):
        raise error(f"layout: {name} has two adjacent runs of the same kind of layer; merge them")
    for kind in pool.kinds:
        if len({piece.region for piece in kind}) != len(kind) or len(kind) > MAX_PIECES_PER_LAYER:
            raise error(
                f"layout: {name} has {len(kind)} regions in a layer; expected at most "
                f"{MAX_PIECES_PER_LAYER}, with different names"
            )
        for piece in kind:
            _check_piece(f"layout: region {piece.region!r}", name, piece, block_tokens, error)
    if pool.payload_bytes > MAX_BLOCK_BYTES:
        raise error(
            f"layout: {name} has {pool.payload_bytes} bytes per block; at most {MAX_BLOCK_BYTES}"
        )


def _check_piece(
    what: str, pool: str, piece: PieceLayout, block_tokens: int, error: type[AiokvError]
) -> None:
    if piece.num_bytes > MAX_BLOCK_BYTES:
        raise error(f"{what}: {piece.num_bytes} bytes per block; at most {MAX_BLOCK_BYTES}")
    try:
        check_axes(what, piece.axes)
    except LayoutError as problem:
        raise error(str(problem)) from None
    if piece.axes is not None and len(piece.axes) != len(piece.shape):
        raise error(f"{what}: axes {piece.axes} of the shape {piece.shape}")
    _check_heads(what, piece, error)
    rows = piece.rows
    if rows is None:
        return
    if pool == STATE:
        raise error(f"{what}: recurrent state has an axis {TOKENS!r}")
    if block_tokens % rows:
        raise error(
            f"{what}: the axis {TOKENS!r} has {rows} rows, but block_tokens is {block_tokens}",
            hint="a block has block_tokens rows of tokens, or one row per several positions",
        )


def _check_heads(what: str, piece: PieceLayout, error: type[AiokvError]) -> None:
    has_heads = piece.axes is not None and HEADS in piece.axes
    if has_heads != (piece.heads is not None):
        raise error(f"{what}: heads is {piece.heads}, and axes is {piece.axes}")
    if piece.axes is None or piece.heads is None:
        return
    first, total = piece.heads
    own = piece.shape[piece.axes.index(HEADS)]
    if first + own > total:
        raise error(f"{what}: {own} heads from head {first} on exceed the total of {total} heads")


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(BlockLayout)
