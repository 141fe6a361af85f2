"""What the runner and the serving loop know of a model, whatever computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiokv
    from aiokv.demo.images import ImageRows
    from aiokv.demo.paging import Span
    from aiokv.worker.device.base import Device, Event

Array = NDArray[np.float32]
CacheT = TypeVar("CacheT", bound="PagedCache")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder-only transformer of the Llama and Qwen families.

    Attributes:
        head_size: numbers of a head; None for ``hidden / heads``.
        qkv_bias: the query, key and value projections add a bias (Qwen2).
        qk_norm: queries and keys are normed head by head (Qwen3).
        seed: of random weights.
    """

    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 352
    head_size: int | None = None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
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
    def qkv(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def rope_tables(self, positions: int) -> tuple[Array, Array]:
        """Cosines and sines ``[positions, head_dim / 2]`` of the rotary embedding."""
        half = self.head_dim // 2
        frequencies = self.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden}, {self.heads} heads over {self.kv_heads} "
            "KV heads"
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: token rows of one or more sequences.

    Attributes:
        tokens: int32 ``[rows]``.
        positions: int32 ``[rows]``.
        spans: which rows are whose, in row order, together all rows.
        images: rows whose embeddings are an image's; their tokens are placeholders.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    spans: list[Span]
    images: list[ImageRows] = field(default_factory=list)


class PagedCache(Protocol):
    """Per-layer tensors of blocks in the memory of the device that computes."""

    def regions(self) -> aiokv.Regions:
        """The tensors as the cache engine moves them; borrowed."""
        ...

    def corrupt(self, block: int) -> None:
        """Spoil one block in every layer: finite, and wrong."""
        ...


class ComputeStream(Protocol):
    """Where a model computes; ``gpu_wait`` makes it wait for a layer."""

    def record(self) -> Event | None:
        """An event behind all that was submitted so far; None when that has finished."""
        ...


class Model(Protocol[CacheT]):
    """A transformer. Stateless beside its weights; used by one thread at a time."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def description(self) -> str:
        """One line for the report: sizes, number formats, how equal bits are come by."""
        ...

    @property
    def stream(self) -> ComputeStream: ...

    def new_device(self) -> Device:
        """What moves the blocks of a cache of this model; for one engine."""
        ...

    def new_cache(self, device_blocks: int, block_tokens: int) -> CacheT: ...

    def forward(
        self, batch: Batch, cache: CacheT, before_layer: Callable[[int], None] | None = None
    ) -> Array:
        """Write the rows' K and V into the cache and return their logits.

        Args:
            before_layer: called before a layer reads the cache; waits until its bytes are there.

        Returns:
            ``[rows, vocab]``. A row's bits depend on its tokens up to its position only.
        """
        ...
