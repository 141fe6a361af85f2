"""What the transformer knows of its attention, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiokv.demo.on_paddle.paged_cache import PaddleCache
    from aiokv.demo.paging import Span


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a batch stand.

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


class Attention(Protocol):
    """Self-attention of all layers: its projections, what it caches, and how it reads that."""

    @property
    def cached(self) -> str:
        """What it caches and in which format, for the report."""
        ...

    def new_cache(self, device_blocks: int, block_tokens: int) -> PaddleCache: ...

    def __call__(self, layer: int, x: Any, rows: Rows, cache: PaddleCache) -> Any:
        """Write the rows into the cache and attend to it.

        Args:
            x: normed, ``[padded rows, hidden]``.

        Returns:
            What is added to the residual, ``[padded rows, hidden]``.
        """
        ...
