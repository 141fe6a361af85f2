"""PrefillClock: how long the steps of a server take that compute prompts."""

from __future__ import annotations

import time
from typing import Final

LEAST_TOKENS: Final = 1_024  # smaller steps do not keep a GPU busy, so they are not measured


class PrefillClock:
    """Measures steps from the scheduler's calls.

    With asynchronous scheduling, a step is built while the one before is computed. So a step takes
    the time from its message, or from the end of the step before if that is later, to its end.
    Steps whose ends were not noticed count together with the next one.
    """

    def __init__(self) -> None:
        self._began: dict[int, tuple[int, float]] = {}  # by step: tokens, time of the message
        self._ended = 0.0

    def begin(self, step: int, num_tokens: int) -> None:
        """Note a step that is sent to the workers, with its number of prompt tokens."""
        if num_tokens >= LEAST_TOKENS:
            self._began[step] = (num_tokens, time.monotonic())

    def end(self, step: int) -> tuple[int, float] | None:
        """Note the end of a step and of all earlier ones.

        Returns:
            Their tokens and seconds; None if none of them computed many tokens.
        """
        last, self._ended = self._ended, time.monotonic()
        if not self._began:
            return None
        ended = [self._began.pop(number) for number in list(self._began) if number <= step]
        if not ended:
            return None
        num_tokens = sum(tokens for tokens, _ in ended)
        seconds = self._ended - max(ended[0][1], last)
        return (num_tokens, seconds) if seconds > 0 else None
