"""Regions: the per-layer tensors whose bytes belong to a block, and their places on the host.

A cache is a registry of named tensors, each with its own bytes per block; the code does not
distinguish K and V. The host pool is block-first, so a block is one contiguous object for disk and
network::

    host block  | layer 0: k, v | layer 1: k, v, scale | ...     each piece aligned to 64 bytes
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiokv.base.groups import ATTENTION, STATE, layers_of
from aiokv.errors import LayoutError
from aiokv.layout.arrays import Piece, describe
from aiokv.layout.axes import TOKENS, check_axes, check_heads, with_axes
from aiokv.layout.host_block import aligned, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Regions:
    """A registry of per-layer tensors. Borrows their memory: it keeps the tensors alive.

    Args:
        num_layers: layers of the model; 0 makes a cache of no bytes.

    Raises:
        LayoutError: ``num_layers`` is negative.
    """

    def __init__(self, *, num_layers: int) -> None:
        if num_layers < 0:
            raise LayoutError(f"num_layers is {num_layers}; it must be at least 0")
        self.num_layers = num_layers
        self._pieces: list[list[Piece]] = [[] for _ in range(num_layers)]
        self._names: list[str] = []
        self._num_blocks: int | None = None
        self._state_pieces: list[Piece] = []
        self._num_state_slots: int | None = None
        self._windows: dict[str, Regions] = {}  # by group
        self._layer_blocks: dict[tuple[int, int], Regions] = {}  # by range of layers

    def add(
        self,
        name: str,
        *,
        layers: Sequence[Any],
        layer_indices: Sequence[int] | None = None,
        rows_per_block: int = 1,
        more_blocks: bool = False,
        dtypes: Sequence[str] | None = None,
        axes: Sequence[str] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Register a region.

        Args:
            name: unique in this registry.
            layers: one tensor ``[device_blocks, ...]`` per layer: numpy, DLPack, or anything with
                ``__array_interface__`` or ``__cuda_array_interface__``. Within a block it is
                C-contiguous; blocks may be any distance apart. Borrowed, never copied.
            layer_indices: the layers that have this region; by default all of them.
            rows_per_block: rows of the first axis that form a block, for a region of smaller
                blocks (such as one head per row); they follow each other without gaps.
            more_blocks: the tensors may have more blocks than the other regions; the additional
                blocks belong to the caller and are never moved.
            dtypes: name of the element type of each tensor, such as ``"float8_e4m3fn"``, where the
                tensors are views as integers; None for the tensors' own. A block in a store is
                found only with the same names.
            axes: names of the axes of a block, outermost first, without the axis of the blocks:
                ``("tokens", "heads", "dim")``, ``("kv", "heads", "tokens", "dim")``, or
                ``("tokens", "dim")`` for a latent that all ranks have (MLA). With
                ``rows_per_block``, the rows are the first axis: ``("heads", "tokens", "dim")`` of
                rows ``[tokens, dim]``, or ``("tokens", "heads", "tokens", "dim")`` of smaller
                blocks. Two names have a meaning:

                * ``"tokens"``: positions. Required where two servers have different
                  ``block_tokens``. An axis may have one row per several positions.
                * ``"heads"``: what tensor parallelism divides among ranks. A region without it has
                  the same bytes on all ranks: a scale over one rank's heads has an axis of heads,
                  if only of length 1.

                Only peers (blocks sent from one server to another) need axes, and only where the
                layouts of the two servers differ; None: the same shape on both, and the same number
                of ranks.
            heads: (first global head of this rank, heads of all ranks together); by default, each
                rank has an equal share, in order of the ranks. Required where several ranks have
                the same heads (fewer KV heads than ranks).

        Raises:
            LayoutError: shapes, strides, device, axes, heads or the number of layers do not fit;
                the registry is unchanged.
        """
        what = f"region {name!r}"
        axis_names = check_axes(what, axes)
        heads = check_heads(what, axis_names, heads)
        indices = self._check_layers(name, len(layers), layer_indices)
        names: Sequence[str | None] = [None] * len(layers) if dtypes is None else dtypes
        if isinstance(names, str) or len(names) != len(layers):
            raise LayoutError(
                f"region {name!r}: dtypes is {dtypes!r} for {len(layers)} tensors; pass one name "
                "per tensor"
            )
        pieces = []
        for layer, tensor, dtype in zip(indices, layers, names, strict=True):
            what = f"region {name!r}, layer {layer}"
            array = describe(tensor, what, dtype).grouped(rows_per_block, what)
            pieces.append(with_axes(array.piece(layer, name), axis_names, heads, what))
        num_blocks = self._common_blocks(name, pieces, more_blocks=more_blocks)
        self.add_pieces(name, pieces, num_blocks)

    def add_pieces(self, name: str, pieces: Iterable[Piece], num_blocks: int | None) -> None:
        """Register a region whose pieces have been checked; all regions have ``num_blocks``."""
        for piece in pieces:
            self._pieces[piece.layer].append(piece)
        self._num_blocks = num_blocks
        self._names.append(name)
        self._place()

    def add_state(
        self,
        name: str,
        *,
        layers: Sequence[Any],
        layer_indices: Sequence[int] | None = None,
        axes: Sequence[str] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Register recurrent state: one row per sequence or snapshot, rather than one per block.

        Args:
            name: unique in this registry.
            layers: one tensor ``[state_slots, ...]`` per layer, as for :meth:`add`.
            layer_indices: the layers that have it; by default all of them.
            axes: names of the axes of a slot, as for :meth:`add`; none of them is ``"tokens"``.
            heads: as for :meth:`add`.

        Raises:
            LayoutError: as :meth:`add`; the registry is unchanged.
        """
        what = f"region {name!r}"
        axis_names = check_axes(what, axes)
        if axis_names is not None and TOKENS in axis_names:
            raise LayoutError(
                f"{what}: axes is {axis_names}; recurrent state has no axis {TOKENS!r}",
                hint="give the axis another name; register KV with Regions.add",
            )
        heads = check_heads(what, axis_names, heads)
        indices = self._check_layers(name, len(layers), layer_indices)
        pieces = []
        num_slots = self._num_state_slots
        for layer, tensor in zip(indices, layers, strict=True):
            array = describe(tensor, f"region {name!r}, layer {layer}")
            if num_slots is not None and array.num_blocks != num_slots:
                raise LayoutError(
                    f"region {name!r}, layer {layer} has {array.num_blocks} state slots; the other "
                    f"state tensors have {num_slots}",
                    hint="the first axis of every state tensor is the slot",
                )
            num_slots = array.num_blocks
            pieces.append(with_axes(array.piece(layer, name), axis_names, heads, what))
        self.add_state_pieces(name, pieces, num_slots)

    def add_state_pieces(self, name: str, pieces: Iterable[Piece], num_slots: int | None) -> None:
        """Register recurrent state whose pieces have been checked."""
        self._state_pieces += pieces
        self._num_state_slots = num_slots
        self._names.append(name)

    def add_window(
        self,
        group: str,
        name: str,
        *,
        layers: Sequence[Any],
        layer_indices: Sequence[int] | None = None,
        dtypes: Sequence[str] | None = None,
        axes: Sequence[str] | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        """Register tensors of a window group, so that its blocks can be copied to host memory, or
        exchanged with peers.

        Args:
            group: name of the group in ``CacheConfig.windows``.
            name: unique in this registry.
            layers: one tensor ``[WindowGroup.device_blocks, ...]`` per layer, as for :meth:`add`.
            layer_indices: the layers of the group; by default all layers of the model.
            dtypes: as for :meth:`add`.
            axes: as for :meth:`add`.
            heads: as for :meth:`add`.

        Raises:
            LayoutError: as :meth:`add`; the registry is unchanged.
        """
        self._check_layers(name, len(layers), layer_indices)
        blocks = self.window_blocks(group)
        blocks.add(
            name,
            layers=layers,
            layer_indices=layer_indices,
            dtypes=dtypes,
            axes=axes,
            heads=heads,
        )
        self.add_window_blocks(group, blocks)

    def add_window_blocks(self, group: str, blocks: Regions) -> None:
        """Register the tensors of a window group, which have been checked.

        Args:
            group: name of the group; tensors that it has already are replaced.
            blocks: the tensors as regions of their own.
        """
        self._windows[group] = blocks
        self._names += [name for name in blocks.names if name not in self._names]

    def _check_layers(
        self, name: str, num_tensors: int, layer_indices: Sequence[int] | None
    ) -> Sequence[int]:
        if name in self._names:
            raise LayoutError(f"region {name!r} is registered already; names must be unique")
        indices = range(self.num_layers) if layer_indices is None else list(layer_indices)
        if num_tensors != len(indices):
            raise LayoutError(
                f"region {name!r} has {num_tensors} tensors for {len(indices)} layers; pass one "
                "tensor per layer"
            )
        if len(set(indices)) != len(indices) or not all(
            0 <= layer < self.num_layers for layer in indices
        ):
            raise LayoutError(
                f"region {name!r}: layer_indices {list(indices)} must be distinct and in "
                f"[0, {self.num_layers})"
            )
        return indices

    def _common_blocks(self, name: str, pieces: list[Piece], *, more_blocks: bool) -> int | None:
        """Return the number of blocks that all tensors have, these included."""
        num_blocks = self._num_blocks
        for piece in pieces:
            if num_blocks is None or piece.num_blocks == num_blocks:
                num_blocks = piece.num_blocks
            elif not more_blocks or piece.num_blocks < num_blocks:
                raise LayoutError(
                    f"region {name!r}, layer {piece.layer} has {piece.num_blocks} blocks; the "
                    f"other tensors have {num_blocks}",
                    hint="the first axis of every tensor is the block; see rows_per_block and "
                    "more_blocks",
                )
        return num_blocks

    def without_tensors(self) -> Regions:
        """Return the same layout without memory, which keeps no tensor alive."""
        copy = self._empty()
        state_names = {piece.region for piece in self._state_pieces}
        window_names = {name for blocks in self._windows.values() for name in blocks.names}
        for name in self._names:
            pieces = [
                replace(piece, pointer=0, owner=None)
                for piece in self.all_pieces()
                if piece.region == name
            ]
            if name in state_names:
                copy.add_state_pieces(name, pieces, self._num_state_slots)
            elif name not in window_names:
                copy.add_pieces(name, pieces, self._num_blocks)
        for group, blocks in self._windows.items():
            copy.add_window_blocks(group, blocks.without_tensors())
        return copy

    def check_layout(self, other: Regions) -> None:
        """Raise unless blocks of ``other`` have the same layout, at whatever addresses.

        Raises:
            LayoutError: names the first difference in layers, regions, bytes per block or axes.
        """
        if other.num_layers != self.num_layers:
            raise LayoutError(
                f"the new tensors have {other.num_layers} layers, not {self.num_layers} as before"
            )
        if other.num_state_slots != self.num_state_slots:
            raise LayoutError(
                f"the new tensors have {other.num_state_slots} state slots, not "
                f"{self.num_state_slots} as before"
            )
        sizes, old_sizes = other.num_window_blocks, self.num_window_blocks
        if sizes != old_sizes:
            raise LayoutError(
                f"the new tensors have the window blocks {sizes}, not {old_sizes} as before"
            )
        for layer in range(self.num_layers):
            before = {piece.region: piece for piece in self.all_pieces() if piece.layer == layer}
            now = {piece.region: piece for piece in other.all_pieces() if piece.layer == layer}
            if list(before) != list(now):
                raise LayoutError(
                    f"layer {layer} has the regions {list(now)}, not {list(before)} as before"
                )
            for name, piece in now.items():
                if (piece.block_bytes, piece.device) != (
                    before[name].block_bytes,
                    before[name].device,
                ):
                    raise LayoutError(
                        f"region {name!r}, layer {layer}: blocks of {piece.block_bytes} bytes on "
                        f"{piece.device}, not of {before[name].block_bytes} bytes on "
                        f"{before[name].device} as before"
                    )
                if (piece.axes, piece.heads) != (before[name].axes, before[name].heads):
                    raise LayoutError(
                        f"region {name!r}, layer {layer}: axes {piece.axes} and heads "
                        f"{piece.heads}, not {before[name].axes} and {before[name].heads} as before"
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the regions, in the order of their registration."""
        return tuple(self._names)

    @property
    def num_blocks(self) -> int | None:
        """Device blocks that every tensor has; None while there is no tensor."""
        return self._num_blocks

    @property
    def num_state_slots(self) -> int | None:
        """Slots that every state tensor has; None while there is no such tensor."""
        return self._num_state_slots

    @property
    def state_pieces(self) -> tuple[Piece, ...]:
        """Pieces of all state tensors; their blocks are slots, with no place in a host block."""
        return tuple(self._state_pieces)

    def state_blocks(self) -> Regions:
        """Return the state tensors as regions of their own, whose blocks are the slots.

        Their host blocks hold the slots that are copied to host memory.
        """
        slots = self._empty()
        for name in dict.fromkeys(piece.region for piece in self._state_pieces):
            pieces = [piece for piece in self._state_pieces if piece.region == name]
            slots.add_pieces(name, pieces, self._num_state_slots)
        return slots

    @property
    def groups(self) -> list[str]:
        """Groups of the tensors besides ``"attention"``."""
        return [*([STATE] if self._state_pieces else []), *self._windows]

    @property
    def num_window_blocks(self) -> dict[str, int]:
        """Blocks that every tensor of a window group has, by group."""
        return {group: blocks.num_blocks or 0 for group, blocks in self._windows.items()}

    def window_blocks(self, group: str) -> Regions:
        """Return the tensors of a window group as regions of their own; empty for none.

        Their host blocks hold the blocks of the group that are copied to host memory.
        """
        return self._windows.get(group) or self._empty()

    def group_blocks(self, group: str) -> Regions:
        """Return the tensors of a group, or of a range of layers, as regions of their own."""
        if (layers := layers_of(group)) is not None:
            return self.layer_blocks(*layers)
        if group == ATTENTION:
            return self
        return self.state_blocks() if group == STATE else self.window_blocks(group)

    def _empty(self) -> Regions:
        return Regions(num_layers=self.num_layers)

    def layer_blocks(self, first: int, end: int) -> Regions:
        """Return the tensors of layers ``first`` to ``end - 1`` as regions of their own.

        Their host blocks hold these layers only.
        """
        if (first, end) not in self._layer_blocks:
            blocks = self._empty()
            for name in dict.fromkeys(piece.region for piece in self.pieces()):
                pieces = [
                    piece
                    for piece in self.pieces()
                    if piece.region == name and first <= piece.layer < end
                ]
                blocks.add_pieces(name, pieces, self._num_blocks)
            self._layer_blocks[first, end] = blocks
        return self._layer_blocks[first, end]

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of one state slot: all layers, all state tensors."""
        return sum(piece.block_bytes for piece in self._state_pieces)

    @property
    def devices(self) -> frozenset[str]:
        """Kinds of device that hold the tensors: ``"cpu"``, ``"cuda"``."""
        return frozenset(piece.device for piece in self.all_pieces())

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the device: all layers, all regions."""
        return sum(piece.block_bytes for piece in self.pieces())

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block in host memory: block_bytes and the alignment between pieces."""
        return payload_bytes(piece.block_bytes for piece in self.pieces())

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one block on the device in one layer."""
        return sum(piece.block_bytes for piece in self._pieces[layer])

    def layer_pieces(self, layer: int) -> tuple[Piece, ...]:
        """Pieces of one layer, in host order."""
        return tuple(self._pieces[layer])

    def host_offset(self, layer: int, region: str) -> int:
        """Return the offset of a region's bytes of a layer in a host block.

        Raises:
            LayoutError: the region does not exist in that layer.
        """
        for piece in self._pieces[layer]:
            if piece.region == region:
                return piece.host_offset_bytes
        raise LayoutError(f"layer {layer} has no region {region!r}")

    def pieces(self) -> Iterator[Piece]:
        """Pieces of all blocks, in host order."""
        for pieces in self._pieces:
            yield from pieces

    def all_pieces(self) -> Iterator[Piece]:
        """Pieces of all blocks, then of all state tensors, then of all window groups."""
        yield from self.pieces()
        yield from self._state_pieces
        for blocks in self._windows.values():
            yield from blocks.pieces()

    def _place(self) -> None:
        self._layer_blocks.clear()
        offset = 0
        for layer, pieces in enumerate(self._pieces):
            for i, piece in enumerate(pieces):
                self._pieces[layer][i] = replace(piece, host_offset_bytes=offset)
                offset += aligned(piece.block_bytes)


def num_blocks_for(total_bytes: int, block: Regions | int) -> int:
    """Return the number of blocks that fit in ``total_bytes``.

    Args:
        total_bytes: size of the memory.
        block: bytes of one block; or a registry, for its host blocks.

    Raises:
        LayoutError: a block has no bytes.
    """
    size = block if isinstance(block, int) else block.payload_bytes
    if size <= 0:
        raise LayoutError(
            f"block is {size} bytes; it must be at least 1", hint="register tensors first"
        )
    return max(total_bytes, 0) // size
