"""Sizes of transformers, and weights that are drawn for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ConfigError

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes that every decoder-only transformer has.

    Attributes:
        seed: seed of random weights.
    """

    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 352
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    seed: int = 1

    def check_positive(self, *names: str) -> None:
        """Check that the common sizes, and those named, are at least 1.

        Raises:
            ConfigError: one is not.
        """
        for name in ("vocab", "hidden", "layers", "heads", "ffn", *names):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig(ModelConfig):
    """Sizes of a model with grouped-query attention (Llama, Qwen).

    Attributes:
        head_size: numbers per head; None for ``hidden / heads``.
        qkv_bias: the query, key and value projections add a bias (Qwen2).
        qk_norm: queries and keys are normed head by head (Qwen3).
    """

    kv_heads: int = 2
    head_size: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        self.check_positive("kv_heads")
        if self.head_size is None and self.hidden % (2 * self.heads):
            raise ConfigError(
                f"hidden ({self.hidden}) must be a multiple of 2 * heads (2 * {self.heads}): "
                "rotary embedding rotates pairs of numbers"
            )
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            raise ConfigError(f"head_size must be even and positive, got {self.head_size}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads if self.head_size is None else self.head_size

    @property
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def score_scale(self) -> float:
        """Factor of the product of a query and a key."""
        return 1.0 / math.sqrt(self.head_dim)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.heads} heads over {self.kv_heads} "
            "KV heads"
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model, float32; matrices are ``[in, out]``.

    Attributes:
        embedding: ``[vocab, hidden]``.
        layers: weights of each layer, by name: ``attention_norm``, ``ffn_norm``, ``gate_up``
            (side by side), ``down``, ``out`` (the projection behind attention), and those of its
            attention: ``qkv`` (side by side), and where the model has them ``qkv_bias``,
            ``query_norm``, ``key_norm``.
        unembedding: ``[hidden, vocab]``.
    """

    embedding: Array
    layers: list[dict[str, Array]]
    final_norm: Array
    unembedding: Array

    @property
    def version(self) -> str:
        """Digest of all weights."""
        hashed = blake2b(digest_size=16)
        for array in (self.embedding, self.final_norm, self.unembedding):
            hashed.update(array.tobytes())
        for layer in self.layers:
            for name in sorted(layer):
                hashed.update(layer[name].tobytes())
        return hashed.hexdigest()


def random_weights(config: GroupedConfig) -> Weights:
    """Draw weights from ``config.seed``: the output of the model has no meaning."""
    attention: dict[str, tuple[int, ...]] = {
        "out": (config.heads * config.head_dim, config.hidden),
        "qkv": (config.hidden, config.qkv),
    }
    if config.qkv_bias:
        attention["qkv_bias"] = (config.qkv,)
    if config.qk_norm:
        attention["query_norm"] = attention["key_norm"] = (config.head_dim,)
    return draw_weights(config, attention)


def draw_weights(config: ModelConfig, attention: dict[str, tuple[int, ...]]) -> Weights:
    """Draw weights from ``config.seed``.

    Args:
        config: sizes.
        attention: shapes of the weights of each layer's attention, by name.
    """
    rng = np.random.default_rng(config.seed)
    hidden, ones = config.hidden, np.ones(config.hidden, dtype=np.float32)
    shapes = attention | {"gate_up": (hidden, 2 * config.ffn), "down": (config.ffn, hidden)}

    def layer() -> dict[str, Array]:
        drawn = {name: _draw(rng, shape) for name, shape in shapes.items()}
        return {"attention_norm": ones, "ffn_norm": ones, **drawn}

    return Weights(
        embedding=rng.standard_normal((config.vocab, hidden), dtype=np.float32),
        layers=[layer() for _ in range(config.layers)],
        final_norm=ones.copy(),
        unembedding=_draw(rng, (hidden, config.vocab)),
    )


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw a vector around 1, or matrices whose products keep the variance of their input."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    drawn: Array = rng.standard_normal(shape, dtype=np.float32)
    drawn *= np.float32(1.0 / math.sqrt(shape[-2]))
    return drawn
