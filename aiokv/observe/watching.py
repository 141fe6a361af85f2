"""Watching: what the live page sees of the transfers of an engine, while a page is open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiokv.observe.snapshot import MAX_TRANSFERS, in_flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv import Observation, TransferSpan
    from aiokv.engine import CacheEngine

IDLE_SECONDS: Final = 5.0  # a page asks once per second


class Watching:
    """Observes an engine from the first question of a page until some seconds after the last one.

    Without a page, the engine has no observer and makes no records.

    Args:
        engine: the engine.
        on_stop: called once, when no page asks any more.
    """

    def __init__(self, engine: CacheEngine, on_stop: Callable[[], object]) -> None:
        self.engine = engine
        self._on_stop = on_stop
        self._seen: Observation | None = None
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.stop)

    def transfers(self, after: float) -> list[TransferSpan]:
        """Return transfers that ended after a time, oldest first, then those in flight.

        Args:
            after: in seconds of ``time.monotonic()``.
        """
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.stop)
        if self._seen is None:
            if self.engine.health().phase != "open":
                return []
            self._seen = self.engine.observing(limit=MAX_TRANSFERS).__enter__()
        ended = [span for span in self._seen.transfers if span.ended_at > after]
        return ended + in_flight(self.engine, self._seen)

    def stop(self) -> None:
        """Stop observing. Called once."""
        self._timer.cancel()
        if self._seen is not None:
            self._seen.__exit__(None, None, None)
        self._on_stop()
