"""What the runner and the serving loop know of a model, whatever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
class ModelConfig(ABC):
    """Sizes of a decoder-only transformer, whatever its attention.

    Attributes:
        seed: of random weights.
    """

    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 352
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    seed: int = 1

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Numbers of a head that rotary embedding turns, in pairs."""

    @property
    @abstractmethod
    def score_scale(self) -> float:
        """What a query's products with its keys are multiplied by."""

    def rope_tables(self, positions: int) -> tuple[Array, Array]:
        """Cosines and sines ``[positions, rotary_dim / 2]`` of the rotary embedding."""
        half = self.rotary_dim // 2
        frequencies = self.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
        angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def check_positive(self, *names: str) -> None:
        """The sizes of every transformer, and those named, are at least 1.

        Raises:
            ConfigError: one is not.
        """
        for name in ("vocab", "hidden", "layers", "heads", "ffn", *names):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


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
        """Corrupt one block in every layer: finite, and wrong."""
        ...

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy the bytes of whole blocks, ``[blocks, block_bytes]``: all layers, all regions.

        Called by the thread that computes; sees what its last forward pass wrote.
        """
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
