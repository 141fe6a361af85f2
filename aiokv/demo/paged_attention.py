"""The paged KV cache of the demo, and grouped-query attention over it.

K and V are one float32 array a layer, ``[device_blocks, block_tokens, kv_heads, head_dim]``: what
an attention kernel on a GPU reads, and what is registered as the cache's regions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import aiokv

Array = NDArray[np.float32]

# Contexts are padded up to a multiple of this. The padded length depends on the position alone, so
# a row's products and sums have the same shape whoever shares its batch.
CONTEXT_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[start, stop)`` of a batch: consecutive positions of one sequence.

    Attributes:
        first_position: position of row ``start``.
        block_table: device block ids of the sequence, int32, covering its last row's position.
    """

    start: int
    stop: int
    first_position: int
    block_table: NDArray[np.int32]


class PagedCache:
    """Per-layer K and V arrays on the cpu device."""

    def __init__(
        self, *, layers: int, device_blocks: int, block_tokens: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (device_blocks, block_tokens, kv_heads, head_dim)
        # zeros, not empty: padding multiplies whatever lies there by 0, which NaN would survive
        self.keys = [np.zeros(shape, dtype=np.float32) for _ in range(layers)]
        self.values = [np.zeros(shape, dtype=np.float32) for _ in range(layers)]
        self.block_tokens = block_tokens
        self._step_blocks = math.lcm(CONTEXT_STEP_TOKENS, block_tokens) // block_tokens

    def regions(self) -> aiokv.Regions:
        regions = aiokv.Regions(num_layers=len(self.keys))
        regions.add("k", layers=self.keys)
        regions.add("v", layers=self.values)
        return regions

    def corrupt(self, block: int) -> None:
        """Negate one block's keys and values in every layer: finite, and wrong."""
        for array in (*self.keys, *self.values):
            np.negative(array[block], out=array[block])

    def write(self, layer: int, spans: list[Span], keys: Array, values: Array) -> None:
        """Store rows ``[rows, kv_heads, head_dim]`` at the places the block tables name."""
        for span in spans:
            positions = np.arange(
                span.first_position, span.first_position + span.stop - span.start, dtype=np.int64
            )
            blocks = span.block_table[positions // self.block_tokens]
            offsets = positions % self.block_tokens
            self.keys[layer][blocks, offsets] = keys[span.start : span.stop]
            self.values[layer][blocks, offsets] = values[span.start : span.stop]

    def attend(self, layer: int, spans: list[Span], queries: Array, out: Array) -> None:
        """Causal attention of ``queries`` ``[rows, heads, head_dim]`` into ``out``, same shape.

        Rows outside all spans (padding) are left as they are.
        """
        for span in spans:
            position, row = span.first_position, span.start
            while row < span.stop:
                blocks = self._padded_blocks(position)
                same_shape = min(span.stop - row, blocks * self.block_tokens - position)
                stop = row + same_shape
                keys, values = self._gather(layer, span.block_table, blocks)
                out[row:stop] = attention(queries[row:stop], keys, values, position)
                row, position = stop, position + same_shape

    def _padded_blocks(self, position: int) -> int:
        needed = position // self.block_tokens + 1
        return -(-needed // self._step_blocks) * self._step_blocks

    def _gather(self, layer: int, table: NDArray[np.int32], blocks: int) -> tuple[Array, Array]:
        """The first ``blocks`` blocks as ``[tokens, kv_heads, head_dim]``, K and V."""
        if len(table) < blocks:
            # its own first block, masked later: another one might be arriving right now
            table = np.pad(table, (0, blocks - len(table)), constant_values=table[0])
        ids = table[:blocks]
        keys, values = self.keys[layer], self.values[layer]
        shape = (blocks * self.block_tokens, *keys.shape[2:])
        return keys[ids].reshape(shape), values[ids].reshape(shape)


def attention(queries: Array, keys: Array, values: Array, first_position: int) -> Array:
    """Grouped-query attention of consecutive positions over one context.

    Args:
        queries: ``[rows, heads, head_dim]``.
        keys: ``[tokens, kv_heads, head_dim]``; those behind a row's position are masked for it.
        values: as keys.
        first_position: position of row 0.

    Returns:
        ``[rows, heads, head_dim]``, each row by products of its own.
    """
    rows, heads, head_dim = queries.shape
    tokens, kv_heads, _ = keys.shape
    scaled = queries * np.float32(1.0 / math.sqrt(head_dim))
    grouped = scaled.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    scores = grouped @ keys.transpose(1, 2, 0)  # [rows, kv_heads, group, tokens]
    positions = np.arange(first_position, first_position + rows)
    hidden = np.arange(tokens) > positions[:, np.newaxis]
    np.copyto(scores, np.float32(-np.inf), where=hidden[:, np.newaxis, np.newaxis, :])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mixed = weights @ values.transpose(1, 0, 2)
    mixed /= weights.sum(axis=-1, keepdims=True)
    return mixed.reshape(rows, heads, head_dim)
