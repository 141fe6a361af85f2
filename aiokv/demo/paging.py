"""Where the rows of a batch lie in a paged cache, and what of it each row attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

# Contexts are padded up to a multiple of this. The padded length depends on the position alone, so
# a row's products and sums have the same shape in every batch.
CONTEXT_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[start, stop)`` of a batch: consecutive positions of one sequence.

    Attributes:
        first_position: position of row ``start``.
        block_table: device block ids of the sequence, int32, covering its last row's position.
    """

    start: int
    stop: int
    first_position: int
    block_table: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Context:
    """Rows ``[start, stop)`` that attend to the same blocks.

    Attributes:
        first_position: position of row ``start``.
        block_ids: padded; what lies behind a row's position is to be masked for it.
    """

    start: int
    stop: int
    first_position: int
    block_ids: NDArray[np.int32]

    def hidden(self, block_tokens: int) -> NDArray[np.bool_]:
        """``[rows, tokens]``: what lies behind a row's position."""
        positions = np.arange(self.first_position, self.first_position + self.stop - self.start)
        tokens = len(self.block_ids) * block_tokens
        return np.arange(tokens) > positions[:, np.newaxis]


class Paging:
    """Block arithmetic of one block size."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._step_blocks = math.lcm(CONTEXT_STEP_TOKENS, block_tokens) // block_tokens

    def slots(self, spans: Iterable[Span]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Block id and offset in it of every row, in row order, ``[rows]`` each."""
        blocks, offsets = [], []
        for span in spans:
            stop = span.first_position + span.stop - span.start
            positions = np.arange(span.first_position, stop, dtype=np.int64)
            blocks.append(span.block_table[positions // self.block_tokens].astype(np.int64))
            offsets.append(positions % self.block_tokens)
        return np.concatenate(blocks), np.concatenate(offsets)

    def contexts(self, spans: Iterable[Span]) -> Iterator[Context]:
        """The rows of all spans, cut where their padded context grows."""
        for span in spans:
            position, row = span.first_position, span.start
            while row < span.stop:
                blocks = self._padded_blocks(position)
                same_shape = min(span.stop - row, blocks * self.block_tokens - position)
                ids = _padded_table(span.block_table, blocks)
                yield Context(row, row + same_shape, position, ids)
                row, position = row + same_shape, position + same_shape

    def _padded_blocks(self, position: int) -> int:
        needed = position // self.block_tokens + 1
        return -(-needed // self._step_blocks) * self._step_blocks


def _padded_table(table: NDArray[np.int32], blocks: int) -> NDArray[np.int32]:
    if len(table) < blocks:
        # its own first block, masked later: another one might be arriving right now
        return np.pad(table, (0, blocks - len(table)), constant_values=table[0])
    return table[:blocks]
