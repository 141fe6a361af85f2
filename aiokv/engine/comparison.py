"""Comparison: is it sooner to fetch blocks of a prompt from a store, or to compute them?

The prompt of a request is ready when its blocks have arrived, but not before the model is free, and
when the model has then computed the rest:

    model  | prompts before this one | the rest of this prompt |
    store  | other fetches | blocks of this prompt |

So blocks that arrive before the model is free cost no time, whatever the speed of the store, and
save the time to compute them. Blocks that arrive later are worth fetching while the store brings
them faster than the model computes them.

A fetch is made in parts, because predictions fail. After each part the rest is compared again, with
the speed that the part had. A part that is late is given up; the blocks before it are a hit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PARTS: Final = 4  # of a fetch
FIRST_PARTS: Final = 8  # of the first fetch from a store, whose speed is not known
LEAST_PART_SECONDS: Final = 0.02  # of computing: shorter parts only cost the latency of the store
PART_LATENCIES: Final = 4  # a part takes at least so many times the latency of its first block
PATIENCE: Final = 1.5  # of the time that a part should take: then it is given up


class Part(NamedTuple):
    """The next part of a fetch.

    Attributes:
        blocks: number of blocks; 0 when computing is sooner.
        seconds: expected time of the part.
        work: expected time of the fetch, this part included.
    """

    blocks: int
    seconds: float
    work: float


NO_PART: Final = Part(0, 0.0, 0.0)


class Comparison:
    """Fetching against computing, for one prompt from the begin of its wait on.

    Args:
        tokens_per_second: speed of the model, above 0.
        block_tokens: tokens per block.
        clock: returns seconds.
        queued_tokens: tokens of other prompts that the model computes before this one.
    """

    def __init__(
        self,
        tokens_per_second: float,
        block_tokens: int,
        clock: Callable[[], float],
        queued_tokens: int = 0,
    ) -> None:
        self._block_seconds = block_tokens / tokens_per_second
        self._clock = clock
        self._part_blocks = 0
        self._free_at = clock() + queued_tokens / tokens_per_second

    @property
    def probe_blocks(self) -> int:
        """Number of blocks whose fetch measures a store."""
        return math.ceil(LEAST_PART_SECONDS / self._block_seconds)

    def gains(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how much sooner the prompt is ready with its first i + 1 blocks fetched.

        Args:
            seconds: ``[N]`` expected time to fetch them; infinity if that is impossible.
        """
        computing = np.arange(1, len(seconds) + 1, dtype=np.float64) * self._block_seconds
        return computing - np.maximum(seconds - self._seconds_until_free(), 0.0)

    def next_part(self, seconds: NDArray[np.float64], wait: float = 0.0) -> Part:
        """Return the part of the first N blocks that are left of a fetch.

        Args:
            seconds: ``[N]`` expected time to fetch the first i + 1 blocks, ascending; zeros when
                the store was not measured yet.
            wait: expected time until the fetch begins.
        """
        if not len(seconds):
            return NO_PART
        gains = self.gains(wait + seconds)
        best = int(gains.argmax())
        if gains[best] <= 0 or best + 1 < min(self.probe_blocks, len(seconds)):
            return NO_PART
        if not self._part_blocks:
            self._part_blocks = self._blocks_per_part(seconds[: best + 1])
        blocks = min(self._part_blocks, best + 1)
        return Part(blocks, float(seconds[blocks - 1]), float(seconds[best]))

    def _blocks_per_part(self, seconds: NDArray[np.float64]) -> int:
        if not seconds[-1]:
            return max(math.ceil(len(seconds) / FIRST_PARTS), self.probe_blocks)
        return max(
            math.ceil(len(seconds) / PARTS),
            self.probe_blocks,
            int(np.searchsorted(seconds, PART_LATENCIES * seconds[0])),
        )

    def patience(self, blocks: int, seconds: float) -> float:
        """Return the seconds after which a fetch of ``blocks`` blocks is given up.

        Args:
            blocks: number of blocks.
            seconds: expected time to fetch them.
        """
        computing = PATIENCE * blocks * self._block_seconds
        return max(self._seconds_until_free() + computing, PATIENCE * seconds)

    def _seconds_until_free(self) -> float:
        return max(self._free_at - self._clock(), 0.0)


def rest_of(seconds: NDArray[np.float64], blocks: int, elapsed: float) -> NDArray[np.float64]:
    """Return the expected times of the blocks behind a part that has arrived.

    Args:
        seconds: times that were expected before the part.
        blocks: blocks of the part.
        elapsed: time that the part has taken.
    """
    expected = float(seconds[blocks - 1])
    left = seconds[blocks:] - expected
    if not expected:
        return left + elapsed / blocks * np.arange(1, len(left) + 1)
    return left * max(elapsed / expected, 1.0)
