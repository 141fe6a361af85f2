"""The paged KV cache in numpy, and grouped-query attention over it.

K and V are one float32 array a layer, ``[device_blocks, block_tokens, kv_heads, head_dim]``: what
an attention kernel on a GPU reads, and what is registered as the cache's regions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

import aiokv
from aiokv.demo.on_cpu import BlockBytes
from aiokv.demo.paging import Context, Paging, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.demo.model import Array


class NumpyCache:
    """Per-layer K and V arrays on the cpu device."""

    def __init__(
        self, *, layers: int, device_blocks: int, block_tokens: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (device_blocks, block_tokens, kv_heads, head_dim)
        # zeros, not empty: padding multiplies whatever lies there by 0, which NaN would survive
        self.keys = [np.zeros(shape, dtype=np.float32) for _ in range(layers)]
        self.values = [np.zeros(shape, dtype=np.float32) for _ in range(layers)]
        self._paging = Paging(block_tokens)
        self._bytes = BlockBytes(self.regions())

    def regions(self) -> aiokv.Regions:
        regions = aiokv.Regions(num_layers=len(self.keys))
        regions.add("k", layers=self.keys)
        regions.add("v", layers=self.values)
        return regions

    def corrupt(self, block: int) -> None:
        """Negate one block's keys and values in every layer."""
        for array in (*self.keys, *self.values):
            np.negative(array[block], out=array[block])

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """See :class:`aiokv.demo.model.PagedCache`."""
        return self._bytes.read(blocks)

    def write(self, layer: int, spans: list[Span], keys: Array, values: Array) -> None:
        """Store rows ``[rows, kv_heads, head_dim]`` at the places the block tables name."""
        slots = self._paging.slots(spans)
        self.keys[layer][slots] = keys
        self.values[layer][slots] = values

    def attend(self, layer: int, spans: list[Span], queries: Array, out: Array) -> None:
        """Causal attention of ``queries`` ``[rows, heads, head_dim]`` into ``out``, same shape.

        Rows outside all spans (padding) are left as they are.
        """
        for context in self._paging.contexts(spans):
            keys, values = self._gather(layer, context)
            rows = slice(context.start, context.stop)
            hidden = context.hidden(self._paging.block_tokens)
            out[rows] = attention(queries[rows], keys, values, hidden)

    def _gather(self, layer: int, context: Context) -> tuple[Array, Array]:
        """The context's blocks as ``[tokens, kv_heads, head_dim]``, K and V."""
        keys, values, ids = self.keys[layer], self.values[layer], context.block_ids
        shape = (len(ids) * self._paging.block_tokens, *keys.shape[2:])
        return keys[ids].reshape(shape), values[ids].reshape(shape)


def attention(queries: Array, keys: Array, values: Array, hidden: NDArray[np.bool_]) -> Array:
    """Grouped-query attention of consecutive positions over one context.

    Args:
        queries: ``[rows, heads, head_dim]``.
        keys: ``[tokens, kv_heads, head_dim]``.
        values: as keys.
        hidden: ``[rows, tokens]``: what a row does not attend to.

    Returns:
        ``[rows, heads, head_dim]``, each row by products of its own.
    """
    rows, heads, head_dim = queries.shape
    _, kv_heads, _ = keys.shape
    scaled = queries * np.float32(1.0 / math.sqrt(head_dim))
    grouped = scaled.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    scores = grouped @ keys.transpose(1, 2, 0)  # [rows, kv_heads, group, tokens]
    np.copyto(scores, np.float32(-np.inf), where=hidden[:, np.newaxis, np.newaxis, :])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mixed = weights @ values.transpose(1, 0, 2)
    mixed /= weights.sum(axis=-1, keepdims=True)
    return mixed.reshape(rows, heads, head_dim)
