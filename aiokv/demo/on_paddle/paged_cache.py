"""The paged KV cache as Paddle tensors, and grouped-query attention over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.demo.paging import Paging, Span
from aiokv.frameworks.paddle import add_region, as_integers, import_paddle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.demo.on_paddle.kv_format import KVFormat

paddle = import_paddle()


class PagedTensors:
    """Keys or values: one tensor ``[blocks, block_tokens, kv_heads, head_dim]`` a layer, and one of
    float32 scales ``[blocks, block_tokens, kv_heads]`` where the format has them."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int], kv_format: KVFormat) -> None:
        self.stored = [paddle.zeros(shape, dtype=kv_format.stored) for _ in range(layers)]
        has_scales = kv_format.largest is not None
        self.scales = [paddle.zeros(shape[:3]) for _ in range(layers)] if has_scales else []
        self._format = kv_format

    def add_to(self, regions: aiokv.Regions, name: str) -> None:
        add_region(regions, name, self.stored)
        if self.scales:
            add_region(regions, f"{name}_scale", self.scales)

    def write(self, layer: int, blocks: Any, offsets: Any, rows: Any) -> None:
        stored, scales = self._format.encode(rows)
        self.stored[layer][blocks, offsets] = stored
        if scales is not None:
            self.scales[layer][blocks, offsets] = scales

    def read(self, layer: int, block_ids: Any) -> Any:
        """Blocks as ``[tokens, kv_heads, head_dim]`` float32."""
        scales = paddle.gather(self.scales[layer], block_ids) if self.scales else None
        rows = self._format.decode(paddle.gather(self.stored[layer], block_ids), scales)
        return rows.flatten(0, 1)


class PaddleCache:
    """Keys and values of all layers."""

    def __init__(
        self, *, layers: int, shape: tuple[int, int, int, int], kv_format: KVFormat
    ) -> None:
        self.keys = PagedTensors(layers, shape, kv_format)
        self.values = PagedTensors(layers, shape, kv_format)
        self._layers = layers
        self._paging = Paging(block_tokens=shape[1])

    def regions(self) -> aiokv.Regions:
        regions = aiokv.Regions(num_layers=self._layers)
        self.keys.add_to(regions, "k")
        self.values.add_to(regions, "v")
        return regions

    def corrupt(self, block: int) -> None:
        """Move one block's numbers to their neighbours' places, in every layer."""
        for tensor in (*self.keys.stored, *self.values.stored):
            numbers = np.from_dlpack(as_integers(tensor))
            numbers[block] = np.roll(numbers[block], 1, axis=-1)

    def write(self, layer: int, spans: list[Span], keys: Any, values: Any) -> None:
        """Store rows ``[rows, kv_heads, head_dim]`` at the places the block tables name."""
        blocks, offsets = map(paddle.to_tensor, self._paging.slots(spans))
        self.keys.write(layer, blocks, offsets, keys)
        self.values.write(layer, blocks, offsets, values)

    def attend(self, layer: int, spans: list[Span], queries: Any) -> Any:
        """Causal attention of ``queries`` ``[rows, heads, head_dim]``, all rows of the spans."""
        parts = []
        for context in self._paging.contexts(spans):
            block_ids = paddle.to_tensor(context.block_ids)
            keys, values = self.keys.read(layer, block_ids), self.values.read(layer, block_ids)
            hidden = context.hidden(self._paging.block_tokens)
            parts.append(attention(queries[context.start : context.stop], keys, values, hidden))
        return paddle.concat(parts)


def attention(queries: Any, keys: Any, values: Any, hidden: NDArray[np.bool_]) -> Any:
    """Grouped-query attention of consecutive positions over one context.

    Args:
        queries: ``[rows, heads, head_dim]``, scaled.
        keys: ``[tokens, kv_heads, head_dim]``.
        values: as keys.
        hidden: ``[rows, tokens]``: what a row does not attend to.

    Returns:
        ``[rows, heads, head_dim]``, each row by products of its own.
    """
    rows, heads, head_dim = queries.shape
    _, kv_heads, _ = keys.shape
    grouped = queries.reshape([rows, kv_heads, heads // kv_heads, head_dim])
    scores = paddle.matmul(grouped, keys.transpose([1, 2, 0]))  # [rows, kv_heads, group, tokens]
    mask = paddle.to_tensor(hidden).unsqueeze([1, 2])
    weights = paddle.nn.functional.softmax(scores.masked_fill(mask, float("-inf")), axis=-1)
    mixed = paddle.matmul(weights, values.transpose([1, 0, 2]))
    return mixed.reshape([rows, heads, head_dim])
