"""PrefillClock: how long vLLM's steps take that compute prompts."""

from __future__ import annotations

import time
from typing import Final

LEAST_TOKENS: Final = 1_024  # smaller steps do not keep a GPU busy, so they are not measured


class PrefillClock:
    """Measures steps from the scheduler's calls.

    With asynchronous scheduling, a step is built while the one before is computed. So a step takes
    the time from its message, or from the end of the step before if that is later, to its end.
    """

    def __init__(self) -> None:
        self._began: dict[int, tuple[int, float]] = {}  # by step: tokens, time of the message
        self._ended = 0.0

    def begin(self, step: int, num_tokens: int) -> None:
        """Note a step that is sent to the workers, with its number of prompt tokens."""
        if num_tokens >= LEAST_TOKENS:
            self._began[step] = (num_tokens, time.monotonic())

    def end(self, step: int) -> tuple[int, float] | None:
        """Note the end of a step; return its tokens and seconds if it computed many tokens."""
        last, self._ended = self._ended, time.monotonic()
        measured = self._began.pop(step, None)
        self._began = {number: one for number, one in self._began.items() if number > step}
        if measured is None:
            return None
        num_tokens, began = measured
        seconds = self._ended - max(began, last)
        return (num_tokens, seconds) if seconds > 0 else None
