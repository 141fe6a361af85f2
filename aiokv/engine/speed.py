"""PrefillSpeed: tokens per second that the model computes of prompts."""

from __future__ import annotations

from collections import deque
from typing import Final

from aiokv.base.rates import bounded_mean

WINDOW: Final = 32  # newest batches from which the speed is estimated
LEAST_TOKENS: Final = 64  # batches of fewer prompt tokens do not keep the model busy
LEAST_SHARE: Final = 0.25  # share of the largest batch; smaller batches do not count


class PrefillSpeed:
    """Speed at which the model computes one more prompt, estimated from its newest batches.

    The estimate is the number of tokens of the last ``WINDOW`` batches, divided by their seconds,
    with bounds on the seconds of extreme batches. So a request that computes n tokens instead of
    fetching them needs about n / ``tokens_per_second`` more seconds.

    - A batch counts by its tokens and seconds: a prompt takes the sum of the times of its batches.
      A mean of the speeds of batches would be higher.
    - Fast and slow batches are treated alike, by their times per token: see
      :func:`~aiokv.base.rates.bounded_mean`. So a pause of the serving loop has hardly an effect,
      nor has a batch that seems short because the end of the batch before was noticed late; but
      if each fifth batch is slow, all of its time counts.
    - After a change of the load, the estimate follows in proportion to the share of new batches in
      the window.
    - Small batches are left out, because a long prompt is computed in large ones: batches of fewer
      than ``LEAST_TOKENS`` prompt tokens, and those that have less than ``LEAST_SHARE`` of the
      tokens of the largest batch in the window. Hence batches that only decode do not count.
    - Generated tokens in a batch are not counted, but the time that they take is: further prompts
      are computed beside them, too.
    - The prompts of a batch are counted together. A request that waits for earlier prompts adds
      their tokens: see ``queued_tokens`` of ``Lease.allocate``.
    - Time without a batch is not counted.

    Args:
        tokens_per_second: known speed; None to measure it.
    """

    def __init__(self, tokens_per_second: float | None) -> None:
        self._known = tokens_per_second
        self._batches: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._estimate: float | None = 0.0  # None if a batch was recorded since the last estimate

    @property
    def tokens_per_second(self) -> float:
        """The known or measured speed; 0.0 before the first measurement."""
        if self._known:
            return self._known
        if self._estimate is None:
            self._estimate = _estimate(self._batches)
        return self._estimate

    def note(self, num_tokens: int, seconds: float) -> None:
        """Note that the model has computed a batch.

        Args:
            num_tokens: tokens of prompts in the batch.
            seconds: duration of the batch, without pauses before or after it.
        """
        if num_tokens >= LEAST_TOKENS and seconds > 0:
            self._batches.append((num_tokens, seconds))
            self._estimate = None


def _estimate(batches: deque[tuple[int, float]]) -> float:
    """Return the tokens per second of large batches, with bounds on extreme times per token."""
    least = LEAST_SHARE * max(tokens for tokens, _ in batches)
    large = ((seconds / tokens, tokens) for tokens, seconds in batches if tokens >= least)
    return 1.0 / bounded_mean(large)
