"""Weights that the demo's transformers have in common, as numpy arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.demo.model import Array, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """What a layer has beside its attention's projections; matrices are ``[in, out]``.

    Attributes:
        out: ``[mixed, hidden]``, of what attention made of all heads.
        gate_up: gate and up projections side by side.
    """

    attention_norm: Array
    out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


LayerT = TypeVar("LayerT", bound=LayerWeights, covariant=True)


@dataclass(frozen=True, slots=True)
class Weights(Generic[LayerT]):
    """All weights of a model.

    Attributes:
        embedding: ``[vocab, hidden]``.
        unembedding: ``[hidden, vocab]``.
    """

    embedding: Array
    layers: Sequence[LayerT]
    final_norm: Array
    unembedding: Array

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """``(k, n)`` of every product ``[rows, k] @ [k, n]`` that a forward pass makes."""
        matrices = [self.unembedding]
        for layer in self.layers:
            arrays = [getattr(layer, field.name) for field in fields(layer)]
            matrices += [array for array in arrays if array is not None and array.ndim > 1]
        return {(matrix.shape[-2], matrix.shape[-1]) for matrix in matrices}


class CommonWeights(TypedDict):
    """The fields of :class:`LayerWeights`."""

    attention_norm: Array
    out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


def random_model(
    config: ModelConfig, random_layer: Callable[[np.random.Generator], LayerT]
) -> Weights[LayerT]:
    """Weights drawn from ``config.seed``."""
    rng = np.random.default_rng(config.seed)
    return Weights(
        embedding=rng.standard_normal((config.vocab, config.hidden), dtype=np.float32),
        layers=[random_layer(rng) for _ in range(config.layers)],
        final_norm=np.ones(config.hidden, dtype=np.float32),
        unembedding=random_matrix(rng, config.hidden, config.vocab),
    )


def random_common_weights(
    rng: np.random.Generator, config: ModelConfig, *, mixed: int
) -> CommonWeights:
    """What every layer has; ``mixed`` counts what attention makes of all heads."""
    return CommonWeights(
        attention_norm=np.ones(config.hidden, dtype=np.float32),
        out=random_matrix(rng, mixed, config.hidden),
        ffn_norm=np.ones(config.hidden, dtype=np.float32),
        gate_up=random_matrix(rng, config.hidden, 2 * config.ffn),
        down=random_matrix(rng, config.ffn, config.hidden),
    )


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> Array:
    matrix: Array = random_stack(rng, 1, rows, columns)[0]
    return matrix


def random_stack(rng: np.random.Generator, count: int, rows: int, columns: int) -> Array:
    """``[count, rows, columns]``; a product with one keeps the variance of its input."""
    stack: Array = rng.standard_normal((count, rows, columns), dtype=np.float32)
    stack *= np.float32(1.0 / math.sqrt(rows))
    return stack


def random_vector(rng: np.random.Generator, length: int) -> Array:
    return rng.uniform(0.5, 1.5, length).astype(np.float32)
