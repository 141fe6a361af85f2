"""SendProgress: the layers and blocks that a send has begun, and the part that comes next. Pure.

::

    range of layers 0    ████████████████████░░░░
    range of layers 1    ████████████░░░░░░░░░░░░    sent early, as far as they are computed
    last range           ████████                    sent when the positions are committed
                         blocks ─►

Blocks of which no layer was sent early move as a whole when they are committed.
"""

from __future__ import annotations

from typing import NamedTuple


class SendPart(NamedTuple):
    """Consecutive blocks, or ranges of their layers, that one transfer sends.

    Attributes:
        first_block: first block of the lease.
        num_blocks: number of blocks.
        first_range: first range of layers.
        end_range: end of the ranges; 0 for whole blocks.
        mark: point after which the layers are computed, see ``TransferPlan.mark``; 0 for
            committed positions.
    """

    first_block: int
    num_blocks: int
    first_range: int = 0
    end_range: int = 0
    mark: int = 0


class SendProgress:
    """Progress of one send.

    Args:
        first_block: first block of the lease to send.
        num_ranges: ranges of layers; 1 if blocks move as a whole only.
        chunk_blocks: most blocks of a part that has all layers. Other parts have as many bytes.
    """

    def __init__(self, first_block: int, num_ranges: int = 1, chunk_blocks: int = 1) -> None:
        self._chunk_blocks = chunk_blocks
        # Per range of layers: the first block that was not begun, the end of the computed blocks,
        # and the mark after which they are computed. The first two do not increase from one range
        # to the next.
        self._next = [first_block] * num_ranges
        self._computed = [first_block] * num_ranges
        self._marks = [0] * num_ranges

    def note_computed(self, end_block: int, num_ranges: int, mark: int) -> None:
        """Note that the first ranges of layers of the blocks before ``end_block`` are computed."""
        for i in range(min(num_ranges, len(self._computed))):
            if self._computed[i] < end_block:
                self._computed[i], self._marks[i] = end_block, mark

    def forget_computed(self) -> None:
        """Forget the layers that were not begun, because their positions will be computed again."""
        self._computed = list(self._next)

    def next_part(self, committed_block: int) -> SendPart | None:
        """Return the next part to begin, and note it with ``begin``; None if there is none.

        Args:
            committed_block: the positions of the blocks before it are committed.
        """
        num_ranges = len(self._next)
        early_end = self._next[0]
        for i in range(1, num_ranges):
            if self._next[i] < (end := min(early_end, committed_block)):
                return self._part(i, num_ranges, end)
        if early_end < committed_block:
            num_blocks = min(self._chunk_blocks, committed_block - early_end)
            return SendPart(early_end, num_blocks)
        for i in range(num_ranges - 1):
            if self._next[i] < self._computed[i]:
                return self._part(i, num_ranges - 1, self._computed[i], self._marks[i])
        return None

    def _part(self, first: int, limit: int, end_block: int, mark: int = 0) -> SendPart:
        """Return a part of range ``first``, and of those behind it with which it can move."""
        begin = self._next[first]
        end = first + 1
        while end < limit and self._next[end] == begin and (not mark or self._marks[end] == mark):
            end += 1
        most = self._chunk_blocks * len(self._next) // (end - first)
        return SendPart(begin, min(most, end_block - begin), first, end, mark)

    def begin(self, part: SendPart) -> None:
        """Note that a part that ``next_part`` has returned was begun."""
        ranges = range(part.first_range, part.end_range or len(self._next))
        for i in ranges:
            self._next[i] = part.first_block + part.num_blocks

    def share(self, part: SendPart) -> float:
        """Return the share of the ranges of layers that a part has."""
        num_ranges = len(self._next)
        return (part.end_range - part.first_range or num_ranges) / num_ranges

    def is_last(self, part: SendPart) -> bool:
        """Return True if a part has the last layers of its blocks."""
        return part.end_range in (0, len(self._next))
