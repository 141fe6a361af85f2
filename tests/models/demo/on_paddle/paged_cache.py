"""The paged cache as Paddle tensors, for any attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.demo.batch import contexts, slots
from aiokv.frameworks.paddle import TensorMemory, add_region, import_paddle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from aiokv.demo.batch import Span
    from tests.models.demo.on_paddle.kv_format import KVFormat

paddle = import_paddle()


class PagedTensors:
    """Keys, say: one tensor ``[blocks, block_tokens, heads, dim]`` a layer, and one of float32
    scales ``[blocks, block_tokens, heads]`` where the format has them."""

    def __init__(self, layers: int, shape: tuple[int, int, int, int], kv_format: KVFormat) -> None:
        self.stored = [paddle.zeros(shape, dtype=kv_format.stored) for _ in range(layers)]
        has_scales = kv_format.largest is not None
        self.scales = [paddle.zeros(shape[:3]) for _ in range(layers)] if has_scales else []
        self._format = kv_format

    def add_to(self, regions: aiokv.Regions, name: str) -> None:
        add_region(regions, name, self.stored)
        if self.scales:
            add_region(regions, f"{name}_scale", self.scales)

    def write(self, layer: int, blocks: Any, offsets: Any, rows: Any) -> None:
        stored, scales = self._format.encode(rows)
        self.stored[layer][blocks, offsets] = stored
        if scales is not None:
            self.scales[layer][blocks, offsets] = scales

    def read(self, layer: int, block_ids: Any) -> Any:
        """Return blocks as ``[tokens, heads, dim]`` float32."""
        scales = paddle.gather(self.scales[layer], block_ids) if self.scales else None
        rows = self._format.decode(paddle.gather(self.stored[layer], block_ids), scales)
        return rows.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class CachedContext:
    """Context that rows ``[start, stop)`` of a batch attend to.

    Attributes:
        rows: by name ``[tokens, heads, dim]`` float32.
        hidden: bool ``[stop - start, tokens]``: what lies behind a row's position.
    """

    start: int
    stop: int
    rows: dict[str, Any]
    hidden: Any


class PaddleCache:
    """Cache tensors of an attention by name; all share one block table."""

    def __init__(self, tensors: Mapping[str, PagedTensors], block_tokens: int) -> None:
        self._tensors = tensors
        self._block_tokens = block_tokens
        self._block_bytes = [piece.view() for piece in self.regions().pieces()]

    def regions(self) -> aiokv.Regions:
        layers = {len(tensors.stored) for tensors in self._tensors.values()}
        regions = aiokv.Regions(num_layers=max(layers))
        for name, tensors in self._tensors.items():
            tensors.add_to(regions, name)
        return regions

    def corrupt(self, block: int) -> None:
        """Shift the numbers of one block by one place in every layer."""
        for tensors in self._tensors.values():
            for tensor in tensors.stored:
                numbers = np.asarray(TensorMemory(tensor))
                numbers[block] = np.roll(numbers[block], 1, axis=-1)

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy the bytes of whole blocks, ``[blocks, block_bytes]``."""
        return np.concatenate([view[blocks] for view in self._block_bytes], axis=1)

    def write(self, layer: int, spans: list[Span], **rows: Any) -> None:
        """Store rows ``[rows, heads, dim]`` of each name at the places the block tables name."""
        blocks, offsets = map(paddle.to_tensor, slots(spans, self._block_tokens))
        for name, tensors in self._tensors.items():
            tensors.write(layer, blocks, offsets, rows[name])

    def read(self, layer: int, spans: list[Span]) -> Iterator[CachedContext]:
        """Yield the contexts of all rows of the spans, in row order."""
        for context in contexts(spans, self._block_tokens):
            block_ids = paddle.to_tensor(context.block_ids)
            rows = {name: each.read(layer, block_ids) for name, each in self._tensors.items()}
            hidden = paddle.to_tensor(context.hidden)
            yield CachedContext(context.start, context.stop, rows, hidden)
