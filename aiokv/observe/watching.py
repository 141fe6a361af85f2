"""Watching: the transfers of an engine, recorded while a live page is open."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from aiokv.observe.snapshot import MAX_TRANSFERS
from aiokv.statistics import TransferSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.engine import CacheEngine

IDLE_SECONDS: Final = 5.0  # a page sends one request per second


class Watching:
    """Observes an engine from the first request of a page until ``IDLE_SECONDS`` after the last.

    Without a page, the engine has no observer and makes no records.

    Args:
        engine: the engine.
        on_stop: called once, when no page sends requests any more.
    """

    def __init__(self, engine: CacheEngine, on_stop: Callable[[], object]) -> None:
        self.engine = engine
        self._on_stop = on_stop
        self._is_observing = False
        self._ended: deque[TransferSpan] = deque(maxlen=MAX_TRANSFERS)
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.stop)

    def transfers(self, after: float) -> list[TransferSpan]:
        """Return transfers that ended after a time, oldest first, then those in flight.

        Args:
            after: in seconds of ``time.monotonic()``.
        """
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.stop)
        if not self._is_observing and self.engine.health().phase == "open":
            self.engine.inspect.add_observer(self._note)
            self._is_observing = True
        ended = [span for span in self._ended if span.ended_at > after]
        return ended + self.engine.inspect.in_flight()[-MAX_TRANSFERS:]

    def stop(self) -> None:
        """Stop observing. Called once."""
        self._timer.cancel()
        self.engine.inspect.remove_observer(self._note)
        self._on_stop()

    def _note(self, record: object, context: object) -> None:
        if isinstance(record, TransferSpan):
            self._ended.append(record)
