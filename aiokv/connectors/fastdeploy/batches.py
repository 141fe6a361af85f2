"""Batches: what the batches of one scheduler compute, and how long the prompts among it take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.connectors.prefills import PrefillClock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.connectors.fastdeploy.holding import Holding
    from aiokv.sync import Calls


class Batches:
    """Batches of one scheduler. The caller holds the lock of :class:`RequestBlocks`.

    Args:
        role: ``Sizes.role``; a server with the role "decode" computes no prompts.

    Attributes:
        count: number of batches.
    """

    def __init__(self, role: str) -> None:
        self.count = 0
        self._computes_prompts = role != "decode"
        self._clock = PrefillClock()
        self._times: list[tuple[int, float]] = []

    def note(self, holdings: Iterable[Holding]) -> None:
        """Note which positions the batch computes, for later commits and for its time."""
        num_tokens, waits = 0, False
        for holding in holdings:
            if not self._computes_prompts:
                if len(holding.request.output_token_ids) > holding.base_outputs:
                    holding.scheduled_tokens, holding.awaited_since = holding.prefill_tokens, 0.0
                continue
            end = holding.batch_end
            if end > holding.scheduled_tokens:
                num_tokens += end - holding.scheduled_tokens
                waits = waits or not holding.has_arrived
                holding.scheduled_tokens, holding.last_batch = end, self.count
        if not waits:
            self._clock.begin(self.count, num_tokens)

    def note_first_tokens(self, holdings: Iterable[Holding]) -> None:
        """Note how long the batches took whose requests have their first tokens."""
        ended = 0
        for holding in holdings:
            if holding.last_batch and len(holding.request.output_token_ids) > holding.base_outputs:
                ended, holding.last_batch = max(ended, holding.last_batch), 0
        measured = self._clock.end(ended) if ended else None
        if measured is not None:
            self._times.append(measured)

    def record_times(self, calls: Calls) -> None:
        """Tell the engine how long the prompts took."""
        for measured in self._times:
            calls.note_prefill(*measured)
        self._times.clear()
