"""Host blocks of two servers, built from one tensor per region that has no blocks and no ranks.

The tensor of a region in a layer has named axes, of which "tokens" are all rows of the prompt and
"heads" are the heads of all ranks. A rank's host block is an index into it, axis by axis, so
nothing here computes an offset, a stride or an overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aiokv.layout.mapping import BlockLayout
from aiokv.layout.regions import Regions


@dataclass(frozen=True)
class Region:
    """A region of the model: names and lengths of its axes, without blocks and ranks.

    Attributes:
        name: of the region.
        dtype: numpy's name of an unsigned integer type.
        fixed: axes besides tokens and heads, with their lengths.
        heads: of all ranks; None without such an axis.
        row_tokens: positions per row; 0 without an axis of tokens.
        layers: indices of the layers that have it.
    """

    name: str
    dtype: str
    fixed: tuple[tuple[str, int], ...]
    heads: int | None
    row_tokens: int
    layers: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        names = [name for name, _ in self.fixed]
        if self.row_tokens:
            names.insert(0, "tokens")
        if self.heads is not None:
            names.append("heads")
        return tuple(names)


def whole_tensors(
    regions: list[Region], num_tokens: int, seed: int
) -> dict[tuple[int, str], np.ndarray]:
    """Return random tensors by (layer, region), axes as in ``Region.axes``."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for region in regions:
        lengths = dict(region.fixed) | {"heads": region.heads or 0}
        if region.row_tokens:
            lengths["tokens"] = num_tokens // region.row_tokens
        shape = [lengths[axis] for axis in region.axes]
        for layer in region.layers:
            limit = np.iinfo(region.dtype).max
            tensors[layer, region.name] = rng.integers(0, limit, shape, region.dtype, endpoint=True)
    return tensors


def heads_of(rank: int, num_ranks: int, heads: int) -> tuple[int, int]:
    """Return (first, number) of the heads of a rank under tensor parallelism."""
    if heads >= num_ranks:
        return rank * (heads // num_ranks), heads // num_ranks
    return rank // (num_ranks // heads), 1


@dataclass(frozen=True)
class Server:
    """One server.

    Attributes:
        block_tokens: token positions per block.
        num_ranks: ranks of tensor parallelism.
        num_layers: of the model.
        regions: in the order of their registration.
        orders: axes of a block of each region, outermost first; "tokens" twice for smaller blocks.
        inner_tokens: rows of a smaller block, where "tokens" occurs twice.
        rows: regions that are registered as rows of their first axis.
    """

    block_tokens: int
    num_ranks: int
    num_layers: int
    regions: list[Region]
    orders: dict[str, tuple[str, ...]]
    inner_tokens: dict[str, int]
    rows: frozenset[str]

    def block(self, region: Region, tensor: np.ndarray, rank: int, index: int) -> np.ndarray:
        """Return the rank's part of a block, axes in this server's order."""
        axes = list(region.axes)
        if region.row_tokens:
            rows = self.block_tokens // region.row_tokens
            tensor = tensor[index * rows : (index + 1) * rows]
            missing = rows - len(tensor)  # the last block of the prompt may be partial
            tensor = np.pad(tensor, [(0, missing), *[(0, 0)] * (tensor.ndim - 1)])
        if region.heads is not None:
            first, count = heads_of(rank, self.num_ranks, region.heads)
            tensor = np.take(tensor, range(first, first + count), axes.index("heads"))
        order = list(self.orders[region.name])
        if order.count("tokens") == 2:
            inner = self.inner_tokens[region.name]
            tensor = tensor.reshape(len(tensor) // inner, inner, *tensor.shape[1:])
            axes.insert(0, "outer tokens")
            order[order.index("tokens")] = "outer tokens"
        return tensor.transpose([axes.index(name) for name in order]).copy()

    def rank_regions(self, rank: int, tensors: dict[tuple[int, str], np.ndarray]) -> Regions:
        """Return regions of two blocks, of which only the shapes matter."""
        registered = Regions(num_layers=self.num_layers)
        for region in self.regions:
            layers = []
            for layer in region.layers:
                block = self.block(region, tensors[layer, region.name], rank, 0)
                rows = block.shape[0] if region.name in self.rows and block.ndim else 1
                shape = (2 * rows, *block.shape[1:]) if rows > 1 else (2, *block.shape)
                layers.append(np.zeros(shape, region.dtype))
            heads = None
            if region.heads is not None:
                heads = (heads_of(rank, self.num_ranks, region.heads)[0], region.heads)
            registered.add(
                region.name,
                layers=layers,
                layer_indices=region.layers,
                rows_per_block=rows,
                axes=self.orders[region.name],
                heads=heads,
            )
        return registered

    def layout(self, rank: int, tensors: dict[tuple[int, str], np.ndarray]) -> BlockLayout:
        regions = self.rank_regions(rank, tensors)
        return BlockLayout.of(regions, self.block_tokens, rank, self.num_ranks)

    def host_block(
        self, rank: int, index: int, tensors: dict[tuple[int, str], np.ndarray], fill: int
    ) -> np.ndarray:
        """Return the bytes of a host block; bytes between the pieces are ``fill``."""
        regions = self.rank_regions(rank, tensors)
        host = np.full(regions.payload_bytes, fill, np.uint8)
        for region in self.regions:
            for layer in region.layers:
                block = self.block(region, tensors[layer, region.name], rank, index)
                offset = regions.host_offset(layer, region.name)
                host[offset : offset + block.nbytes] = block.reshape(-1).view(np.uint8)
        return host

    def known_bytes(
        self,
        rank: int,
        index: int,
        tensors: dict[tuple[int, str], np.ndarray],
        positions: range,
    ) -> np.ndarray:
        """Return a mask of a host block: bytes that belong to the positions."""
        marks = {}
        for region in self.regions:
            for layer in region.layers:
                mark = np.zeros_like(tensors[layer, region.name])
                limit = np.iinfo(region.dtype).max
                if region.row_tokens:
                    step = region.row_tokens
                    mark[positions.start // step : -(-positions.stop // step)] = limit
                else:
                    mark[...] = limit
                marks[layer, region.name] = mark
        return self.host_block(rank, index, marks, 0) == 255


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    return math.ceil(num_tokens / block_tokens)
