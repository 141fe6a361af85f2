"""BorderSearch: how much of a prompt to fetch when a hit may end only where a snapshot is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.scheduler.reader import Borders
    from aiokv.stores.store_set import StoreAnswer


class BorderSearch:
    """Borders of one prompt behind its hit, and the expected time to bring each of them.

    A border is the end of a block. A hit may end there when all blocks before it, and its snapshot,
    are in a tier.

    Args:
        borders: first blocks behind the hit.
        block_tokens: tokens per block.

    Attributes:
        digests: of the blocks that the stores are to be asked for next, for snapshots; empty when
            the search has ended.
    """

    def __init__(self, borders: Borders, block_tokens: int) -> None:
        self._hit = borders.hit
        self._cached = borders.cached
        self._block_tokens = block_tokens
        self._may_end = borders.may_end
        self._block_seconds = np.zeros(0)  # [N] to bring all blocks before the border
        self._snapshot_seconds = np.zeros(0)  # [N], infinity if no store has it
        self.digests = borders.digests

    @property
    def asked(self) -> int:
        """Number of blocks behind the hit that the stores were asked for."""
        return len(self._block_seconds)

    @property
    def missing_digests(self) -> bytes:
        """Those of ``digests`` whose blocks no tier has."""
        return self.digests[self._num_cached() * KEY_BYTES :]

    def _num_cached(self) -> int:
        """Return the number of leading blocks of the part that a tier has."""
        return min(max(self._cached - self._hit - self.asked, 0), len(self.digests) // KEY_BYTES)

    def note(self, answer: StoreAnswer, snapshot_seconds: NDArray[np.float64]) -> bool:
        """Note what the stores have.

        Args:
            answer: to ``missing_digests``.
            snapshot_seconds: ``[N]`` to fetch each snapshot, infinity if no store has it.

        Returns:
            True when the blocks behind these may be reached, too.
        """
        num_cached = self._num_cached()
        before = self._block_seconds[-1] if self.asked else 0.0
        seconds = before + np.concatenate([np.zeros(num_cached), answer.seconds[: answer.blocks]])
        self._block_seconds = np.concatenate([self._block_seconds, seconds])
        self._snapshot_seconds = np.concatenate(
            [self._snapshot_seconds, snapshot_seconds[: len(seconds)]]
        )
        is_whole = len(seconds) == len(self.digests) // KEY_BYTES
        self._may_end = self._may_end[: self.asked]
        self.digests = b""
        return is_whole

    def go_on(self, borders: Borders) -> None:
        """Take the next blocks. Ends the search when another lease has changed the hit."""
        if borders.hit == self._hit:
            self._cached = borders.cached
            self._may_end = np.concatenate([self._may_end, borders.may_end])
            self.digests = borders.digests

    def best(self, tokens_per_second: float) -> int:
        """Return the number of blocks before the border at which the prompt is ready soonest.

        Args:
            tokens_per_second: speed of the model; 0 to return the last border that can be reached.

        Returns:
            The number of blocks, those of the hit included; 0 when it is best to fetch nothing.
        """
        can_end = self._may_end & np.isfinite(self._snapshot_seconds)
        if not can_end.any():
            return 0
        ends = np.arange(1, self.asked + 1)
        if not tokens_per_second:
            return self._hit + int(ends[can_end][-1])
        computing = ends * (self._block_tokens / tokens_per_second)
        gains = np.where(can_end, computing - self._block_seconds - self._snapshot_seconds, -np.inf)
        best = int(gains.argmax())
        return self._hit + best + 1 if gains[best] > 0 else 0

    def note_blocks(self, cached: int, *, is_end: bool) -> None:
        """Note that the first ``cached`` blocks of the prompt are in a tier.

        Args:
            cached: number of blocks.
            is_end: True when those behind them cannot be brought.
        """
        count = max(cached - self._hit, 0)
        self._block_seconds = self._block_seconds.copy()
        self._block_seconds[:count] = 0.0
        if is_end:
            self._may_end = self._may_end & (np.arange(self.asked) < count)

    def note_failure(self, end: int) -> None:
        """Note that the snapshot behind the first ``end`` blocks cannot be brought."""
        self._snapshot_seconds[end - self._hit - 1] = np.inf
