"""BoundarySearch: how much of a prompt to fetch when a hit needs copies of several groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.engine.comparison import rest_of
from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.base.groups import BlockGroup
    from aiokv.engine.comparison import Comparison
    from aiokv.scheduler.reader import Boundaries
    from aiokv.stores.store_set import Found, StoreAnswer


class _GroupCosts:
    """Copies of the blocks of a group, per block behind the hit."""

    def __init__(self, group: BlockGroup, hit: int) -> None:
        self._group = group
        self._hit = hit
        self._latency_seconds = 0.0
        self._seconds = np.zeros(0)  # time to fetch each copy; infinity if no store has it
        self._is_absent = np.ones(0, np.bool_)  # whether no tier has the copy

    def note(self, found: Found, num_blocks: int) -> None:
        self._latency_seconds = max(self._latency_seconds, found.latency_seconds)
        self._seconds = np.concatenate([self._seconds, found.seconds[:num_blocks]])
        self._is_absent = np.ones(len(self._seconds), np.bool_)

    def note_cached(self, is_cached: NDArray[np.bool_]) -> None:
        """Note which of the first copies are in a tier; the others are not."""
        self._is_absent = np.ones(len(self._seconds), np.bool_)
        self._is_absent[: len(is_cached)] = ~is_cached[: len(self._seconds)]

    def _needed(self, index: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return where the window, and the end of the sink, of a hit are that ends behind a block.

        Blocks of the present hit are left out: their copies are in a tier.
        """
        begin = np.maximum(index + 1 - self._group.tail_blocks, 0)
        head = np.clip(self._group.head_blocks - self._hit, 0, begin)
        return begin, head

    def seconds(self) -> NDArray[np.float64]:
        """Return the time to fetch all copies that a hit needs, for each boundary."""
        is_missing = self._is_absent & np.isinf(self._seconds)
        is_fetched = self._is_absent & ~is_missing
        cost = self._of_needed(np.where(is_fetched, self._seconds, 0.0))
        cost += np.where(self._of_needed(is_fetched) > 0, self._latency_seconds, 0.0)
        return np.where(self._of_needed(is_missing) > 0, np.inf, cost)

    def _of_needed(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        """Return the sum of a value over all copies that a hit needs, for each boundary."""
        total: NDArray[np.float64] = np.zeros(len(values) + 1)
        np.cumsum(values, out=total[1:])
        index = np.arange(len(self._seconds))
        begin, head = self._needed(index)
        needed: NDArray[np.float64] = total[index + 1] - total[begin] + total[head]
        return needed

    def note_failure(self, index: int) -> None:
        """Record that the missing blocks or copies of the boundary cannot be fetched."""
        (begin,), (head,) = self._needed(np.array([index]))
        for part in (slice(0, head), slice(begin, index + 1)):
            self._seconds[part][self._is_absent[part]] = np.inf


class BoundarySearch:
    """Boundaries of one prompt behind its hit, and the expected time to bring each of them.

    A boundary is the end of a block. A hit may end there when all blocks before it, and the copies
    that it needs of each other group, are in a tier.

    Args:
        boundaries: first blocks behind the hit.
        groups: groups of the cache beside full attention.
        block_tokens: tokens per block.

    Attributes:
        hit: number of blocks of the present hit.
        digests: digests of the blocks to look up in the stores next; empty when the search has
            ended.
    """

    def __init__(
        self, boundaries: Boundaries, groups: Sequence[BlockGroup], block_tokens: int
    ) -> None:
        self.hit = boundaries.hit
        self._cached = boundaries.cached
        self._block_tokens = block_tokens
        self._may_end = boundaries.may_end
        self._block_seconds = np.zeros(0)  # [N] to bring all blocks before the boundary
        self._slowness = 1.0  # time that the parts have taken, in multiples of the expected time
        self._groups = {group.name: _GroupCosts(group, boundaries.hit) for group in groups}
        self.digests = boundaries.digests

    @property
    def asked(self) -> int:
        """Number of blocks behind the hit that the stores were asked for."""
        return len(self._block_seconds)

    @property
    def missing_digests(self) -> bytes:
        """The ``digests`` of blocks that no tier has."""
        return self.digests[self._num_cached() * KEY_BYTES :]

    def _num_cached(self) -> int:
        """Return the number of leading blocks of the part that a tier has."""
        return min(max(self._cached - self.hit - self.asked, 0), len(self.digests) // KEY_BYTES)

    def reachable(self, answer: StoreAnswer) -> bytes:
        """Return the leading ``digests`` of blocks that a tier or, by the answer, a store has."""
        return self.digests[: (self._num_cached() + answer.blocks) * KEY_BYTES]

    def note(self, answer: StoreAnswer, found: Sequence[Found]) -> bool:
        """Note the blocks that the stores have.

        Args:
            answer: to ``missing_digests``.
            found: for each group, the digests among ``reachable`` that the stores have.

        Returns:
            True when the blocks behind these may be reached, too.
        """
        num_cached = self._num_cached()
        before = self._block_seconds[-1] if self.asked else 0.0
        seconds = before + np.concatenate([np.zeros(num_cached), answer.seconds[: answer.blocks]])
        self._block_seconds = np.concatenate([self._block_seconds, seconds])
        for group, copies in zip(self._groups.values(), found, strict=True):
            group.note(copies, len(seconds))
        is_whole = len(seconds) == len(self.digests) // KEY_BYTES
        self._may_end = self._may_end[: self.asked]
        self.digests = b""
        return is_whole

    def go_on(self, boundaries: Boundaries) -> None:
        """Take the next blocks. Ends the search when another lease has changed the hit."""
        if boundaries.hit == self.hit:
            self._cached = boundaries.cached
            self._may_end = np.concatenate([self._may_end, boundaries.may_end])
            self.digests = boundaries.digests

    def note_cached(self, group: str, is_cached: NDArray[np.bool_]) -> None:
        """Note which blocks behind the hit have copies in a tier, from the first one on; the others
        have none."""
        self._groups[group].note_cached(is_cached)

    def best(self, comparison: Comparison | None, wait: float = 0.0) -> int:
        """Return the number of blocks before the boundary at which the prompt is ready soonest.

        Args:
            comparison: compares fetching and computing; None to return the last boundary that can
                be reached.
            wait: expected seconds until the fetch begins.

        Returns:
            The number of blocks, those of the hit included; 0 when it is best to fetch nothing.
        """
        seconds = self._seconds()
        can_end = self._may_end & np.isfinite(seconds)
        if not can_end.any():
            return 0
        if comparison is None:
            return self.hit + int(np.flatnonzero(can_end)[-1]) + 1
        gains = comparison.gains(np.where(can_end, wait + seconds, np.inf))
        best = int(gains.argmax())
        return self.hit + best + 1 if gains[best] > 0 else 0

    def seconds(self, end: int) -> float:
        """Return the expected time to bring all that a hit of ``end`` blocks lacks."""
        return float(self._seconds()[end - self.hit - 1])

    def copy_seconds(self, end: int) -> float:
        """Return the part of ``seconds`` for the copies of other groups."""
        return float(self._copy_seconds()[end - self.hit - 1])

    def block_seconds(self, first: int, end: int) -> NDArray[np.float64]:
        """Return the expected times to fetch the first i + 1 blocks from block ``first`` on.

        Args:
            first: the first block that no tier has.
            end: the block behind the last one.

        Returns:
            ``[end - first]`` float64; empty if the tiers have all blocks.
        """
        return self._block_seconds[max(first - self.hit, 0) : max(end, first) - self.hit]

    def _copy_seconds(self) -> NDArray[np.float64]:
        seconds = np.zeros(self.asked)
        for group in self._groups.values():
            seconds += group.seconds()
        return seconds * self._slowness

    def _seconds(self) -> NDArray[np.float64]:
        return self._block_seconds + self._copy_seconds()

    def note_part(self, first: int, cached: int, expected: float, elapsed: float) -> None:
        """Note the end of a part. If it was slow, the rest is expected to be slow, too.

        Args:
            first: first block of the part.
            cached: number of blocks of the prompt that are in a tier now.
            expected: expected duration of the part, in seconds; 0.0 if it was unknown.
            elapsed: its duration.
        """
        if expected:
            self._slowness *= max(elapsed / expected, 1.0)
        begin, end = first - self.hit, min(cached - self.hit, self.asked)
        if end > begin:
            rest = rest_of(self._block_seconds[begin:], end - begin, elapsed)
            self._block_seconds[:end] = 0.0
            self._block_seconds[end:] = rest

    def note_blocks(self, cached: int, *, is_end: bool) -> None:
        """Note that the first ``cached`` blocks of the prompt are in a tier.

        Args:
            cached: number of blocks.
            is_end: True when those behind them cannot be brought.
        """
        count = max(cached - self.hit, 0)
        self._block_seconds[:count] = 0.0
        if is_end:
            self._may_end = self._may_end & (np.arange(self.asked) < count)

    def note_failure(self, end: int) -> None:
        """Record that the missing copies of a hit of ``end`` blocks cannot be fetched."""
        for group in self._groups.values():
            group.note_failure(end - self.hit - 1)
        self._may_end = self._may_end & (np.arange(self.asked) != end - self.hit - 1)
