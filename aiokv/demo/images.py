"""Images in prompts: placeholder tokens, and embeddings in place of those of an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.types import Item

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv.demo.weights import Array

PLACEHOLDER_TOKEN: Final = 0
IMAGE_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``[start, stop)`` of a batch that are positions of an image.

    Attributes:
        first: position in the image of row ``start``.
    """

    start: int
    stop: int
    first: int
    content_hash: bytes

    def embeddings(self, hidden: int) -> Array:
        """Return ``[rows, hidden]``."""
        return _encode(self.content_hash, hidden)[self.first : self.first + self.stop - self.start]


def image(number: int, offset: int) -> Item:
    """Return image ``number`` at ``offset`` in a prompt."""
    return Item(number.to_bytes(8, "little"), offset, IMAGE_TOKENS)


def image_rows(items: Sequence[Item], first: int, count: int, row: int) -> Iterator[ImageRows]:
    """Yield the parts of ``items`` in ``count`` positions from ``first``, as rows from ``row``."""
    for content_hash, offset, length in items:
        start, stop = max(first, offset), min(first + count, offset + length)
        if start < stop:
            place = row + start - first
            yield ImageRows(place, place + stop - start, start - offset, content_hash)


@lru_cache(maxsize=256)
def _encode(content_hash: bytes, hidden: int) -> Array:
    rng = np.random.default_rng(np.frombuffer(content_hash, dtype=np.uint8))
    return rng.standard_normal((IMAGE_TOKENS, hidden), dtype=np.float32)
