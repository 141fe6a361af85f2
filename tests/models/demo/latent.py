"""Transformers with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): sizes, weights.

A token's keys and values of all heads are one latent vector and one key that carries its position;
only these two are cached. As in DeepSeek-V2-Lite, queries are not compressed.
Equal bits need widths that are multiples of 16, as the defaults are: BLAS has treated rows of
products of other widths differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiokv.demo.weights import ModelConfig, Weights, draw_weights
from aiokv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(ModelConfig):
    """Sizes of a model with multi-head latent attention, called as in its checkpoints.

    Attributes:
        kv_lora_rank: numbers of the latent that keys and values are made from.
        qk_nope_head_dim: numbers of a head's query and key that no position turns.
        qk_rope_head_dim: numbers of a head's query that its position turns, and of the one key of
            this kind that all heads share.
        v_head_dim: numbers of a head's value.
    """

    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32

    def __post_init__(self) -> None:
        self.check_positive("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")

    @property
    def query_dim(self) -> int:
        """Return the size of a head's query, both parts together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Return the numbers that a layer caches per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.query_dim)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.heads} heads over a latent of "
            f"{self.kv_lora_rank} + {self.qk_rope_head_dim}"
        )


def random_weights(config: LatentConfig) -> Weights:
    """Draw weights from ``config.seed``: the output of the model has no meaning.

    Each layer has, beside those of every transformer:

    - ``query`` ``[hidden, heads * query_dim]``, of each head first what no position turns;
    - ``compress`` ``[hidden, cached_dim]``, to the latent and, side by side, the shared key;
    - ``latent_norm`` ``[kv_lora_rank]``, of the latent before it is cached;
    - ``key_up`` ``[heads, qk_nope_head_dim, kv_lora_rank]``; the keys of a head are the latents
      times its transpose, so it projects the queries of the head into the space of the latents;
    - ``value_up`` ``[heads, kv_lora_rank, v_head_dim]``.
    """
    heads, rank = config.heads, config.kv_lora_rank
    weights = draw_weights(
        config,
        {
            "out": (heads * config.v_head_dim, config.hidden),
            "query": (config.hidden, heads * config.query_dim),
            "compress": (config.hidden, config.cached_dim),
            "latent_norm": (rank,),
            "key_up": (heads, rank, config.qk_nope_head_dim),
            "value_up": (heads, rank, config.v_head_dim),
        },
    )
    for layer in weights.layers:
        layer["key_up"] = layer["key_up"].transpose(0, 2, 1).copy()
    return weights
