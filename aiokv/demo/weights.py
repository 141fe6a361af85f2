"""Weights of the demo's transformers, as numpy arrays: whoever computes takes them from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aiokv.demo.model import Array, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; matrices are ``[in, out]``.

    Attributes:
        qkv: query, key and value projections side by side.
        qkv_bias: ``[out]``, of a model with ``qkv_bias``.
        query_norm: ``[head_dim]``, of a model with ``qk_norm``; ``key_norm`` likewise.
        gate_up: gate and up projections side by side.
    """

    attention_norm: Array
    qkv: Array
    out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array
    qkv_bias: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model.

    Attributes:
        embedding: ``[vocab, hidden]``.
        unembedding: ``[hidden, vocab]``.
    """

    embedding: Array
    layers: list[LayerWeights]
    final_norm: Array
    unembedding: Array

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """``(k, n)`` of every product ``[rows, k] @ [k, n]`` that a forward pass makes."""
        matrices = [self.unembedding]
        for layer in self.layers:
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return {(matrix.shape[0], matrix.shape[1]) for matrix in matrices}


def random_weights(config: ModelConfig) -> Weights:
    """Drawn from ``config.seed``: what the model says is nonsense, what it computes is real."""
    rng = np.random.default_rng(config.seed)
    return Weights(
        embedding=rng.standard_normal((config.vocab, config.hidden), dtype=np.float32),
        layers=[_random_layer(config, rng) for _ in range(config.layers)],
        final_norm=np.ones(config.hidden, dtype=np.float32),
        unembedding=_random_matrix(rng, config.hidden, config.vocab),
    )


def _random_layer(config: ModelConfig, rng: np.random.Generator) -> LayerWeights:
    mixed = config.heads * config.head_dim
    return LayerWeights(
        attention_norm=np.ones(config.hidden, dtype=np.float32),
        qkv=_random_matrix(rng, config.hidden, config.qkv),
        out=_random_matrix(rng, mixed, config.hidden),
        ffn_norm=np.ones(config.hidden, dtype=np.float32),
        gate_up=_random_matrix(rng, config.hidden, 2 * config.ffn),
        down=_random_matrix(rng, config.ffn, config.hidden),
        qkv_bias=_random_vector(rng, config.qkv) if config.qkv_bias else None,
        query_norm=_random_vector(rng, config.head_dim) if config.qk_norm else None,
        key_norm=_random_vector(rng, config.head_dim) if config.qk_norm else None,
    )


def _random_matrix(rng: np.random.Generator, rows: int, columns: int) -> Array:
    matrix: Array = rng.standard_normal((rows, columns), dtype=np.float32)
    matrix *= np.float32(1.0 / math.sqrt(rows))
    return matrix


def _random_vector(rng: np.random.Generator, length: int) -> Array:
    return rng.uniform(0.5, 1.5, length).astype(np.float32)
