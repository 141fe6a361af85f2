"""Transformers with grouped-query attention (Llama, Qwen): their sizes and weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.demo.model import ModelConfig
from aiokv.demo.weights import (
    LayerWeights,
    Weights,
    random_common_weights,
    random_matrix,
    random_model,
    random_vector,
)
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from aiokv.demo.model import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig(ModelConfig):
    """Sizes of a model whose query heads share key and value heads, group by group.

    Attributes:
        head_size: numbers of a head; None for ``hidden / heads``.
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
                "rotary embedding turns pairs of a head's numbers"
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
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.heads} heads over {self.kv_heads} "
            "KV heads"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLayerWeights(LayerWeights):
    """Weights of one layer.

    Attributes:
        qkv: query, key and value projections side by side.
        qkv_bias: ``[out]``, of a model with ``qkv_bias``.
        query_norm: ``[head_dim]``, of a model with ``qk_norm``; ``key_norm`` likewise.
    """

    qkv: Array
    qkv_bias: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None


def random_weights(config: GroupedConfig) -> Weights[GroupedLayerWeights]:
    """Drawn from ``config.seed``: what the model says is nonsense, what it computes is real."""

    def layer(rng: np.random.Generator) -> GroupedLayerWeights:
        return GroupedLayerWeights(
            **random_common_weights(rng, config, mixed=config.heads * config.head_dim),
            qkv=random_matrix(rng, config.hidden, config.qkv),
            qkv_bias=random_vector(rng, config.qkv) if config.qkv_bias else None,
            query_norm=random_vector(rng, config.head_dim) if config.qk_norm else None,
            key_norm=random_vector(rng, config.head_dim) if config.qk_norm else None,
        )

    return random_model(config, layer)
