"""Images in prompts: placeholder tokens, and embeddings in place of those of an encoder."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv import Item
from aiokv.demo.transformer import NumpyTransformer
from aiokv.demo.workload import Conversation, Turn, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.demo.batch import Batch
    from aiokv.demo.weights import Array
    from aiokv.demo.workload import ChatSizes

PLACEHOLDER_TOKEN: Final = 0
IMAGE_TOKENS: Final = 24


class ImageTransformer(NumpyTransformer):
    """The numpy model, with images."""

    def embed(self, batch: Batch) -> Array:
        """See :meth:`NumpyTransformer.embed`."""
        embedded = super().embed(batch)
        for start, rows in image_embeddings(batch, self.config.hidden):
            embedded[start : start + len(rows)] = rows
        return embedded


def with_images(workload: Workload, count: int, sizes: ChatSizes) -> Workload:
    """Let each conversation begin with one of ``count`` images, behind its system prompt."""
    conversations = []
    for number, conversation in enumerate(workload.conversations):
        shown = number // sizes.system_prompts % count
        first = _with_image(conversation.turns[0], shown, sizes.system_tokens)
        conversations.append(Conversation(conversation.name, [first, *conversation.turns[1:]]))
    title = f"{workload.title}, {count} images of {IMAGE_TOKENS} positions"
    return Workload(title, conversations)


def image(number: int, offset: int) -> Item:
    """Return image ``number`` at ``offset`` in a prompt."""
    return Item(number.to_bytes(8, "little"), offset, IMAGE_TOKENS)


def image_embeddings(batch: Batch, hidden: int) -> Iterator[tuple[int, Array]]:
    """Yield the rows of a batch that are positions of images: the first row, and embeddings."""
    for span in batch.spans:
        first, end = span.first_position, span.first_position + span.stop - span.start
        for content_hash, offset, length in span.items:
            start, stop = max(first, offset), min(end, offset + length)
            if start < stop:
                embedded = _encode(content_hash, hidden)[start - offset : stop - offset]
                yield span.start + start - first, embedded


def _with_image(turn: Turn, number: int, offset: int) -> Turn:
    placeholders = np.full(IMAGE_TOKENS, PLACEHOLDER_TOKEN, dtype=np.int32)
    added = np.insert(turn.added, offset, placeholders)
    return replace(turn, added=added, items=(image(number, offset),))


@lru_cache(maxsize=256)
def _encode(content_hash: bytes, hidden: int) -> Array:
    rng = np.random.default_rng(np.frombuffer(content_hash, dtype=np.uint8))
    return rng.standard_normal((IMAGE_TOKENS, hidden), dtype=np.float32)
