"""Input of a forward pass: token rows, the places of their KV, and what each row attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from aiokv import Item

# Contexts are padded up to a multiple of this. The padded length depends on the position alone, so
# the products and sums of a row have the same shape in every batch.
CONTEXT_STEP_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[start, stop)`` of a batch: consecutive positions of one sequence.

    Attributes:
        first_position: position of row ``start``.
        block_table: device block ids of the sequence, int32, up to its last row's position.
        items: images of the sequence, for models that embed them.
    """

    start: int
    stop: int
    first_position: int
    block_table: NDArray[np.int32]
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of one sequence that a step computes.

    Attributes:
        tokens: tokens of the sequence, from its beginning.
        first_position: the first position to compute.
        count: positions to compute.
        block_table: see ``Span``.
        items: see ``Span``.
    """

    tokens: list[int]
    first_position: int
    count: int
    block_table: NDArray[np.int32]
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """Token rows of one or more sequences.

    Attributes:
        tokens: int32 ``[rows]``.
        positions: int32 ``[rows]``.
        spans: the rows of each sequence, in row order, together all rows.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    spans: list[Span]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Self:
        """Return the rows of all parts, in order."""
        tokens: list[int] = []
        positions: list[int] = []
        spans = []
        for part in parts:
            row, stop = len(tokens), part.first_position + part.count
            spans.append(
                Span(row, row + part.count, part.first_position, part.block_table, part.items)
            )
            tokens += part.tokens[part.first_position : stop]
            positions += range(part.first_position, stop)
        return cls(np.array(tokens, dtype=np.int32), np.array(positions, dtype=np.int32), spans)


@dataclass(frozen=True, slots=True)
class Context:
    """Rows ``[start, stop)`` that attend to the same blocks.

    Attributes:
        block_ids: padded.
        hidden: ``[rows, tokens]``, true behind a row's position.
    """

    start: int
    stop: int
    block_ids: NDArray[np.int32]
    hidden: NDArray[np.bool_]


def slots(spans: Iterable[Span], block_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the block id of each row and its offset in the block, in row order."""
    blocks, offsets = [], []
    for span in spans:
        stop = span.first_position + span.stop - span.start
        positions = np.arange(span.first_position, stop, dtype=np.int64)
        blocks.append(span.block_table[positions // block_tokens].astype(np.int64))
        offsets.append(positions % block_tokens)
    return np.concatenate(blocks), np.concatenate(offsets)


def contexts(spans: Iterable[Span], block_tokens: int) -> Iterator[Context]:
    """Yield the rows of all spans in order, cut where their padded context grows."""
    step_blocks = math.lcm(CONTEXT_STEP_TOKENS, block_tokens) // block_tokens
    for span in spans:
        first, row = span.first_position, span.start
        while row < span.stop:
            blocks = -(-(first // block_tokens + 1) // step_blocks) * step_blocks
            tokens = blocks * block_tokens
            rows = min(span.stop - row, tokens - first)
            # Pad each table with its own first block, because a transfer may write any other block.
            ids = np.full(blocks, span.block_table[0])
            ids[: len(span.block_table)] = span.block_table[:blocks]
            positions = np.arange(first, first + rows)
            yield Context(row, row + rows, ids, np.arange(tokens) > positions[:, np.newaxis])
            row, first = row + rows, first + rows
