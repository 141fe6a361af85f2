"""A small decoder-only transformer in numpy float32: RMSNorm, RoPE, GQA, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.demo.batch import contexts, slots
from aiokv.demo.row_tiles import RowTiles
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.demo.batch import Batch, Span
    from aiokv.demo.weights import Array, GroupedConfig, Weights
    from aiokv.worker.device.base import Event


class NumpyCache:
    """K and V in the memory of the cpu device.

    One array per layer, ``[device_blocks, block_tokens, kv_heads, head_dim]``: the layout that an
    attention kernel on a GPU reads, and that is registered as the regions of the cache.
    """

    def __init__(self, config: GroupedConfig, device_blocks: int, block_tokens: int) -> None:
        shape = (device_blocks, block_tokens, config.kv_heads, config.head_dim)
        # Zeros, not empty: padding multiplies unused positions by 0, and 0 * NaN is NaN.
        self.keys = [np.zeros(shape, dtype=np.float32) for _ in range(config.layers)]
        self.values = [np.zeros(shape, dtype=np.float32) for _ in range(config.layers)]
        self.block_tokens = block_tokens
        self._block_bytes = [piece.view() for piece in self.regions().pieces()]

    def regions(self) -> aiokv.Regions:
        """Return the arrays as regions for a cache engine; they stay owned by this object."""
        regions = aiokv.Regions(num_layers=len(self.keys))
        regions.add("k", layers=self.keys)
        regions.add("v", layers=self.values)
        return regions

    def corrupt(self, block: int) -> None:
        """Negate the keys and values of one block in every layer."""
        for array in (*self.keys, *self.values):
            np.negative(array[block], out=array[block])

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy the bytes of whole blocks, ``[blocks, block_bytes]``: all layers, all regions.

        The thread that computes calls it, and gets the writes of its last forward pass.
        """
        return np.concatenate([view[blocks] for view in self._block_bytes], axis=1)

    def write(self, layer: int, spans: list[Span], keys: Array, values: Array) -> None:
        """Store rows ``[rows, kv_heads, head_dim]`` in the blocks of the block tables."""
        places = slots(spans, self.block_tokens)
        self.keys[layer][places] = keys
        self.values[layer][places] = values

    def attend(self, layer: int, spans: list[Span], queries: Array, out: Array) -> None:
        """Write causal attention of scaled ``queries`` ``[rows, heads, head_dim]`` into ``out``."""
        keys, values = self.keys[layer], self.values[layer]
        for part in contexts(spans, self.block_tokens):
            rows, shape = slice(part.start, part.stop), (-1, *keys.shape[2:])
            read = [array[part.block_ids].reshape(shape) for array in (keys, values)]
            out[rows] = attention(queries[rows], read[0], read[1], part.hidden)


class ThreadStream:
    """The runner's thread as a stream. It works in order, and a wait blocks it."""

    def wait_event(self, event: Event) -> None:
        """Block, without the GIL, until the bytes of the layer have arrived."""
        event.synchronize()

    def record(self) -> None:
        """Return None: the work has ended when the call returns."""


class CpuModel:
    """A model whose forward pass has ended when it returns.

    Attributes:
        stream: compute stream. ``LayerView.gpu_wait(layer, stream)`` makes it wait for a layer, and
            its ``record()`` returns an event behind all submitted work, or None if that has ended.
    """

    stream: Any = ThreadStream()

    def new_device(self) -> CpuDevice:
        """Return the device that moves the blocks of a cache of this model; for one engine."""
        return CpuDevice()


class NumpyTransformer(CpuModel):
    """Forward passes over a paged cache.

    Without state except for its weights; one thread at a time uses it. Any object with the same
    public methods and attributes can be served in its place.
    """

    def __init__(self, config: GroupedConfig, weights: Weights, *, max_context_tokens: int) -> None:
        self.config = config
        self._weights = weights
        self._tiles = RowTiles.for_weights(weights)
        self._cos, self._sin = rope_tables(config.rope_theta, config.head_dim, max_context_tokens)

    @property
    def description(self) -> str:
        """One line for the report: sizes, number formats, and how bits are kept equal."""
        return f"numpy: {self.config}, float32, products in tiles of {self._tiles.tile} rows"

    def new_cache(self, device_blocks: int, block_tokens: int) -> NumpyCache:
        return NumpyCache(self.config, device_blocks, block_tokens)

    def forward(
        self, batch: Batch, cache: NumpyCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """Write K and V of the rows into the cache and return their logits.

        Args:
            batch: the rows.
            cache: has a block for each position of the rows.
            before_layer: called before a layer reads the cache; waits for the layer's bytes.

        Returns:
            ``[rows, vocab]``. The bits of a row depend on the tokens up to its position only.
        """
        matmul, weights, rows = self._tiles.matmul, self._weights, len(batch.tokens)
        x = np.zeros((self._tiles.padded(rows), self.config.hidden), dtype=np.float32)
        x[:rows] = self.embed(batch)
        for index, layer in enumerate(weights.layers):
            if before_layer is not None:
                before_layer(index)
            qkv = matmul(self._norm(x, layer["attention_norm"]), layer["qkv"])
            x += matmul(self._attention(index, layer, batch, qkv, cache), layer["out"])
            gate_up = matmul(self._norm(x, layer["ffn_norm"]), layer["gate_up"])
            x += matmul(swiglu(gate_up), layer["down"])
        return matmul(self._norm(x, weights.final_norm), weights.unembedding)[:rows]

    def embed(self, batch: Batch) -> Array:
        """Return the embeddings of the rows, ``[rows, hidden]``."""
        return self._weights.embedding[batch.tokens]

    def _attention(
        self, index: int, layer: dict[str, Array], batch: Batch, qkv: Array, cache: NumpyCache
    ) -> Array:
        """Store keys and values, and return the mix of all heads, ``[padded rows, out]``."""
        config, rows = self.config, len(batch.tokens)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        if config.qkv_bias:
            qkv += layer["qkv_bias"]
        queries, keys, values = np.split(
            qkv[:rows].reshape(rows, -1, config.head_dim),
            (config.heads, config.heads + config.kv_heads),
            axis=1,
        )
        if config.qk_norm:
            queries = self._norm(queries, layer["query_norm"])
            keys = self._norm(keys, layer["key_norm"])
        cache.write(index, batch.spans, rotate(keys, cos, sin), values)
        scaled = rotate(queries, cos, sin) * np.float32(config.score_scale)
        mixed = np.zeros((len(qkv), config.heads, config.head_dim), dtype=np.float32)
        cache.attend(index, batch.spans, scaled, mixed)
        return mixed.reshape(len(qkv), -1)

    def _norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + np.float32(self.config.norm_epsilon)) * weight
        return normed


def attention(queries: Array, keys: Array, values: Array, hidden: NDArray[np.bool_]) -> Array:
    """Return grouped-query attention of consecutive positions over one context.

    Args:
        queries: ``[rows, heads, head_dim]``, scaled.
        keys: ``[tokens, kv_heads, head_dim]``.
        values: as keys.
        hidden: ``[rows, tokens]``, true where a row does not attend.

    Returns:
        ``[rows, heads, head_dim]``, each row by products of its own.
    """
    (rows, heads, head_dim), (_, kv_heads, _) = queries.shape, keys.shape
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, head_dim)
    scores = grouped @ keys.transpose(1, 2, 0)  # [rows, kv_heads, group, tokens]
    np.copyto(scores, np.float32(-np.inf), where=hidden[:, np.newaxis, np.newaxis, :])
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    mixed: Array = weights @ values.transpose(1, 0, 2)
    mixed /= weights.sum(axis=-1, keepdims=True)
    return mixed.reshape(rows, heads, head_dim)


def rope_tables(theta: float, dim: int, positions: int) -> tuple[Array, Array]:
    """Return cosines and sines ``[positions, dim / 2]`` of the rotary embedding."""
    frequencies = theta ** (-np.arange(dim // 2) / (dim // 2))
    angles = np.outer(np.arange(positions), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary embedding to ``[rows, heads, head_dim]``, tables ``[rows, head_dim / 2]``."""
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, np.newaxis], sin[:, np.newaxis]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def swiglu(gate_up: Array) -> Array:
    """Return ``silu(gate) * up`` of ``[rows, 2 * ffn]``, gate and up side by side."""
    gate, up = np.split(gate_up, 2, axis=-1)
    activated: Array = gate / (np.float32(1.0) + np.exp(-gate)) * up
    return activated
