"""Interface between the transformer and its attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from aiokv.demo.batch import Span
    from tests.models.demo.on_paddle.kv_format import KVFormat
    from tests.models.demo.on_paddle.paged_cache import PaddleCache
    from tests.models.demo.on_paddle.products import Products


@dataclass(frozen=True, slots=True)
class Rows:
    """Positions of the rows of a batch.

    Attributes:
        spans: together all rows.
        cos: ``[rows, 1, rotary_dim / 2]``, and ``sin``: of the rows' positions.
    """

    spans: list[Span]
    cos: Any
    sin: Any

    @property
    def count(self) -> int:
        found: int = self.cos.shape[0]
        return found


class Attention(ABC):
    """Self-attention of all layers: its projections, what it caches, and how it reads the cache.

    Args:
        config: sizes of the model.
        products: products with the weights.
        kv_format: of what is cached.
    """

    kind: ClassVar[str]  # of what is cached, for the report

    def __init__(self, config: Any, products: Products, kv_format: KVFormat) -> None:
        self.config = config
        self.products = products
        self.kv_format = kv_format

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Return the numbers per head that rotary embedding rotates."""

    @property
    def cached(self) -> str:
        """Return the cached regions and their format."""
        return f"{self.kind} as {self.kv_format.name}"

    @abstractmethod
    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache: ...

    @abstractmethod
    def __call__(
        self, layer: int, weights: dict[str, Any], x: Any, rows: Rows, cache: PaddleCache
    ) -> Any:
        """Write the rows into the cache and attend to it.

        Args:
            layer: number of the layer.
            weights: of the layer, as Paddle tensors.
            x: normed, ``[padded rows, hidden]``.
            rows: of the batch.
            cache: has a block for each position of the rows.

        Returns:
            What is added to the residual, ``[padded rows, hidden]``.
        """
