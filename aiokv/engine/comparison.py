"""Comparison of the times to fetch blocks of a prompt from a store and to compute them.

The model computes the rest of a prompt when the fetched blocks have arrived and the model is free.
Then the prompt is ready:

    model  | prompts before this one | the rest of this prompt |
    store  | other fetches | blocks of this prompt |

So blocks that arrive before the model is free do not delay the request at any speed of the store,
and save the time to compute them. Later blocks are fetched only if the store delivers them faster
than the model computes them.

A fetch is divided into parts, because the estimates can be wrong. After each part, the remaining
blocks are compared again, with the measured speed of the part. The request stops waiting for a late
part; the blocks before it are a hit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PARTS: Final = 4  # parts per fetch
FIRST_PARTS: Final = 8  # parts of the first fetch from a store, whose speed is unknown
LEAST_PART_SECONDS: Final = 0.02  # time to compute the smallest part
PART_LATENCIES: Final = 4  # shortest part, in multiples of the time to fetch one block
PATIENCE: Final = 1.5  # a part is late after this multiple of its expected time


class FetchPart(NamedTuple):
    """Next part of a fetch.

    Attributes:
        blocks: number of blocks; 0 when computing is sooner.
        seconds: expected duration of the part.
        work: expected duration of the rest of the fetch, including this part.
    """

    blocks: int
    seconds: float
    work: float


NO_PART: Final = FetchPart(0, 0.0, 0.0)


class Comparison:
    """Comparison of fetching and computing for one prompt, from the start of its wait.

    Args:
        tokens_per_second: speed of the model, above 0.
        block_tokens: tokens per block.
        clock: returns the time in seconds.
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
        """Smallest number of blocks in a fetch that measures the speed of a store."""
        return math.ceil(LEAST_PART_SECONDS / self._block_seconds)

    def gains(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds that fetching the first i + 1 blocks saves, for each i.

        Args:
            seconds: ``[N]`` expected time to fetch the blocks; infinity if this is impossible.

        Returns:
            ``[N]`` seconds; negative where computing is sooner.
        """
        computing = np.arange(1, len(seconds) + 1, dtype=np.float64) * self._block_seconds
        return computing - np.maximum(seconds - self._seconds_until_free(), 0.0)

    def next_part(self, seconds: NDArray[np.float64], wait: float = 0.0) -> FetchPart:
        """Return the next part of a fetch with N remaining blocks; ``NO_PART`` to compute them.

        Args:
            seconds: ``[N]`` expected time to fetch the first i + 1 blocks, ascending; zeros if
                the store was not measured yet.
            wait: expected seconds until the fetch begins.
        """
        if not len(seconds):
            return NO_PART
        gains = self.gains(wait + seconds)
        best = int(gains.argmax())
        if gains[best] <= 0 or best + 1 < min(self.probe_blocks, len(seconds)):
            return NO_PART
        return self.first_part(seconds[: best + 1])

    def first_part(self, seconds: NDArray[np.float64]) -> FetchPart:
        """Return the next part of a fetch of N blocks that was found to be sooner than computing.

        Args:
            seconds: ``[N]`` as for ``next_part``; at least one.
        """
        if not self._part_blocks:
            self._part_blocks = self._blocks_per_part(seconds)
        blocks = min(self._part_blocks, len(seconds))
        return FetchPart(blocks, float(seconds[blocks - 1]), float(seconds[-1]))

    def _blocks_per_part(self, seconds: NDArray[np.float64]) -> int:
        if not seconds[-1]:
            return max(math.ceil(len(seconds) / FIRST_PARTS), self.probe_blocks)
        return max(
            math.ceil(len(seconds) / PARTS),
            self.probe_blocks,
            int(np.searchsorted(seconds, PART_LATENCIES * seconds[0])),
        )

    def patience(self, blocks: int, seconds: float) -> float:
        """Return the seconds after which a fetch of ``blocks`` blocks is late.

        Args:
            blocks: number of blocks.
            seconds: expected time to fetch the blocks.
        """
        computing = PATIENCE * blocks * self._block_seconds
        return max(self._seconds_until_free() + computing, PATIENCE * seconds)

    def _seconds_until_free(self) -> float:
        return max(self._free_at - self._clock(), 0.0)


def rest_of(seconds: NDArray[np.float64], blocks: int, elapsed: float) -> NDArray[np.float64]:
    """Return the expected times to fetch the blocks that follow a part that has arrived.

    Args:
        seconds: ``[N]`` expected times before the part was fetched; the first block of the part is
            the first entry.
        blocks: number of blocks in the part.
        elapsed: seconds that the part has taken.
    """
    expected = float(seconds[blocks - 1])
    left = seconds[blocks:] - expected
    if not expected:
        return left + elapsed / blocks * np.arange(1, len(left) + 1)
    return left * max(elapsed / expected, 1.0)
