"""PrefillSpeed: tokens per second that the model computes of prompts."""

from __future__ import annotations

import time
from typing import Final

FASTER_WEIGHT: Final = 0.3  # of a newer measurement: pauses of the serving loop only lower it
SLOWER_WEIGHT: Final = 0.05
LEAST_TOKENS: Final = 64  # batches that publish fewer are mostly decode steps


class PrefillSpeed:
    """Moving average over the batches of the model, from the blocks that they publish.

    A batch takes the time until its end; on a device that computes behind the host's back, until
    the next batch begins.

    Args:
        tokens_per_second: known speed; None to measure it.
        block_tokens: positions per block.
    """

    def __init__(self, tokens_per_second: float | None, block_tokens: int) -> None:
        self._known = tokens_per_second
        self._block_tokens = block_tokens
        self._average = 0.0
        self._batch_id = 0
        self._began = 0.0
        self._ended = 0.0
        self._tokens = 0

    @property
    def tokens_per_second(self) -> float:
        """The known or measured speed; 0.0 before the first measurement."""
        return self._known or self._average

    def batch_begins(self, batch_id: int) -> None:
        """Note that the model begins to compute a batch."""
        now = time.monotonic()
        if self._began:
            self.note(self._tokens, (self._ended or now) - self._began)
        self._batch_id, self._began, self._ended, self._tokens = batch_id, now, 0.0, 0

    def batch_ends(self, batch_id: int) -> None:
        """Note that the work of a batch has ended, on a device that the host waits for."""
        if batch_id == self._batch_id:
            self._ended = time.monotonic()

    def published(self, blocks: int) -> None:
        """Note that a lease has published blocks that the newest batch has computed."""
        self._tokens += blocks * self._block_tokens

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that the model has computed tokens of prompts in a batch of the caller."""
        if num_tokens < LEAST_TOKENS or seconds <= 0:
            return
        newest = num_tokens / seconds
        weight = FASTER_WEIGHT if newest > self._average else SLOWER_WEIGHT
        self._average += (weight if self._average else 1.0) * (newest - self._average)
