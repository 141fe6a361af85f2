"""A small decoder-only transformer in numpy float32: RMSNorm, RoPE, GQA, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.demo.on_cpu import CpuModel
from aiokv.demo.on_numpy.paged_cache import NumpyCache
from aiokv.demo.row_tiles import RowTiles, use_one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.demo.grouped import GroupedConfig, GroupedLayerWeights
    from aiokv.demo.model import Array, Batch
    from aiokv.demo.paging import Span
    from aiokv.demo.weights import Weights


class NumpyTransformer(CpuModel):
    """Forward passes over a paged cache. Stateless beside the weights; one thread at a time."""

    def __init__(
        self,
        config: GroupedConfig,
        weights: Weights[GroupedLayerWeights],
        *,
        max_context_tokens: int,
    ) -> None:
        use_one_blas_thread()
        self.config = config
        self._weights = weights
        self._cos, self._sin = config.rope_tables(max_context_tokens)
        self._tiles = RowTiles.for_shapes(weights.matrix_shapes())

    @property
    def description(self) -> str:
        return f"numpy: {self.config}, float32, products in tiles of {self._tiles.tile} rows"

    def new_cache(self, device_blocks: int, block_tokens: int) -> NumpyCache:
        return NumpyCache(
            layers=self.config.layers,
            device_blocks=device_blocks,
            block_tokens=block_tokens,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
        )

    def forward(
        self, batch: Batch, cache: NumpyCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """See :class:`aiokv.demo.model.Model`."""
        epsilon, matmul = self.config.norm_epsilon, self._tiles.matmul
        rows, padded = len(batch.tokens), self._tiles.padded(len(batch.tokens))
        x = np.zeros((padded, self.config.hidden), dtype=np.float32)
        x[:rows] = self._weights.embedding[batch.tokens]
        for part in batch.images:
            x[part.start : part.stop] = part.embeddings(self.config.hidden)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._weights.layers):
            if before_layer is not None:
                before_layer(index)
            qkv = matmul(rms_norm(x, layer.attention_norm, epsilon), layer.qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            mixed = self._attention(index, layer, batch.spans, qkv, cos, sin, cache)
            x += matmul(mixed, layer.out)
            gate_up = matmul(rms_norm(x, layer.ffn_norm, epsilon), layer.gate_up)
            x += matmul(swiglu(gate_up), layer.down)
        normed = rms_norm(x, self._weights.final_norm, epsilon)
        return matmul(normed, self._weights.unembedding)[:rows]

    def _attention(
        self,
        index: int,
        layer: GroupedLayerWeights,
        spans: list[Span],
        qkv: Array,
        cos: Array,
        sin: Array,
        cache: NumpyCache,
    ) -> Array:
        config, rows = self.config, len(cos)
        heads = qkv.reshape(len(qkv), -1, config.head_dim)[:rows]
        queries, keys, values = np.split(
            heads, (config.heads, config.heads + config.kv_heads), axis=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = rms_norm(queries, layer.query_norm, config.norm_epsilon)
            keys = rms_norm(keys, layer.key_norm, config.norm_epsilon)
        cache.write(index, spans, rotate(keys, cos, sin), values)
        mixed = np.zeros((len(qkv), config.heads, config.head_dim), dtype=np.float32)
        cache.attend(index, spans, rotate(queries, cos, sin), mixed[:rows])
        return mixed.reshape(len(qkv), -1)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    scaled: Array = x / np.sqrt(mean_square + np.float32(epsilon)) * weight
    return scaled


def rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of ``[rows, heads, head_dim]`` by tables ``[rows, head_dim / 2]``."""
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, np.newaxis], sin[:, np.newaxis]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def swiglu(gate_up: Array) -> Array:
    """``silu(gate) * up`` of ``[rows, 2 * ffn]``, gate and up side by side."""
    gate, up = np.split(gate_up, 2, axis=-1)
    decay: Array = np.exp(-gate)
    return gate / (decay + np.float32(1.0)) * up
