"""A small decoder-only transformer in numpy float32: RMSNorm, RoPE, GQA, SwiGLU, greedy decoding.

Weights are random from a fixed seed: what it says is nonsense, what it computes is real.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aiokv.demo.paged_attention import Array, PagedCache, Span
from aiokv.demo.row_tiles import RowTiles
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer."""

    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"hidden ({self.hidden}) must be a multiple of 2 * heads (2 * {self.heads}): "
                "rotary embedding turns pairs of a head's numbers"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, ``[in, out]`` each."""

    attention_norm: Array
    qkv: Array
    out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: token rows of one or more sequences.

    Attributes:
        tokens: int32 ``[rows]``.
        positions: int32 ``[rows]``.
        spans: which rows are whose, in row order, together all rows.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    spans: list[Span]


class Transformer:
    """Forward passes over a paged cache. Stateless beside the weights; one thread at a time."""

    def __init__(self, config: ModelConfig, *, max_context_tokens: int) -> None:
        self.config = config
        rng = np.random.default_rng(config.seed)
        self.embedding = rng.standard_normal((config.vocab, config.hidden), dtype=np.float32)
        self.layers = [_random_layer(config, rng) for _ in range(config.layers)]
        self.final_norm = np.ones(config.hidden, dtype=np.float32)
        self.unembedding = _random_weight(rng, config.hidden, config.vocab)
        self._cos, self._sin = _rope_tables(config, max_context_tokens)
        self.tiles = RowTiles.for_shapes(
            {
                weight.shape
                for layer in self.layers
                for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
            }
            | {self.unembedding.shape}
        )

    def new_cache(self, device_blocks: int, block_tokens: int) -> PagedCache:
        return PagedCache(
            layers=self.config.layers,
            device_blocks=device_blocks,
            block_tokens=block_tokens,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
        )

    def forward(
        self, batch: Batch, cache: PagedCache, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """Write the rows' K and V into the cache and return their logits.

        Args:
            before_layer: called before a layer reads the cache; waits until its bytes are there.

        Returns:
            ``[rows, vocab]``. A row's bits depend on its tokens up to its position only.
        """
        config = self.config
        rows, padded = len(batch.tokens), self.tiles.padded(len(batch.tokens))
        x = np.zeros((padded, config.hidden), dtype=np.float32)
        x[:rows] = self.embedding[batch.tokens]
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(index)
            normed = rms_norm(x, layer.attention_norm, config.norm_epsilon)
            qkv = self.tiles.matmul(normed, layer.qkv)
            mixed = self._attention(index, batch.spans, qkv, cos, sin, cache)
            x += self.tiles.matmul(mixed, layer.out)
            normed = rms_norm(x, layer.ffn_norm, config.norm_epsilon)
            x += self.tiles.matmul(swiglu(self.tiles.matmul(normed, layer.gate_up)), layer.down)
        normed = rms_norm(x, self.final_norm, config.norm_epsilon)
        return self.tiles.matmul(normed, self.unembedding)[:rows]

    def _attention(
        self, index: int, spans: list[Span], qkv: Array, cos: Array, sin: Array, cache: PagedCache
    ) -> Array:
        config, rows = self.config, len(cos)
        heads = qkv.reshape(len(qkv), -1, config.head_dim)[:rows]
        queries = rotate(heads[:, : config.heads], cos, sin)
        keys = rotate(heads[:, config.heads : config.heads + config.kv_heads], cos, sin)
        values = heads[:, config.heads + config.kv_heads :]
        cache.write(index, spans, keys, values)
        mixed = np.zeros((len(qkv), config.heads, config.head_dim), dtype=np.float32)
        cache.attend(index, spans, queries, mixed[:rows])
        return mixed.reshape(len(qkv), config.hidden)


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


def _rope_tables(config: ModelConfig, positions: int) -> tuple[Array, Array]:
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _random_weight(rng: np.random.Generator, rows: int, columns: int) -> Array:
    weight: Array = rng.standard_normal((rows, columns), dtype=np.float32)
    weight *= np.float32(1.0 / math.sqrt(rows))
    return weight


def _random_layer(config: ModelConfig, rng: np.random.Generator) -> LayerWeights:
    return LayerWeights(
        attention_norm=np.ones(config.hidden, dtype=np.float32),
        qkv=_random_weight(rng, config.hidden, config.qkv),
        out=_random_weight(rng, config.hidden, config.hidden),
        ffn_norm=np.ones(config.hidden, dtype=np.float32),
        gate_up=_random_weight(rng, config.hidden, 2 * config.ffn),
        down=_random_weight(rng, config.ffn, config.hidden),
    )
