"""Retention: keeps cached prompts for a time, and lets others go early."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from aiokv.base import checks
from aiokv.base.types import as_items, as_tokens
from aiokv.engine.contexts import context_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from aiokv.base.types import Item, TokenIds
    from aiokv.engine.parts import Parts
    from aiokv.scheduler.effects import Effects

MAX_PRIORITY: Final = 3
MAX_SECONDS: Final = 86_400.0


class Retention:
    """Retentions of one engine. One timer per different end, which few retentions have alone."""

    def __init__(self, parts: Parts) -> None:
        self._lifetime = parts.lifetime
        self._apply = parts.dispatcher.apply
        self._scheduler = parts.scheduler
        self._block_tokens = parts.config.block_tokens
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by end, in seconds of the loop's clock

    def retain(
        self,
        tokens: TokenIds,
        *,
        seconds: float,
        priority: int,
        salt: str,
        adapter: str,
        items: Sequence[Item],
    ) -> int:
        """See ``CacheEngine.retain``."""
        seconds = checks.seconds("seconds", seconds, minimum=0.0, maximum=MAX_SECONDS)
        checks.integer("priority", priority, minimum=0, maximum=MAX_PRIORITY)
        end = self._end_after(seconds)
        retain = self._scheduler.retention.retain
        retained = self._change(retain, tokens, salt, adapter, items, priority, end)
        if end not in self._timers:
            self._timers[end] = self._lifetime.loop.call_at(end, self._end, end)
        return retained

    def demote(self, tokens: TokenIds, *, salt: str, adapter: str, items: Sequence[Item]) -> int:
        """See ``CacheEngine.demote``."""
        return self._change(self._scheduler.retention.demote, tokens, salt, adapter, items)

    def forget(self, tokens: TokenIds, *, salt: str, adapter: str, items: Sequence[Item]) -> int:
        """See ``CacheEngine.forget``."""
        return self._change(self._scheduler.retention.forget, tokens, salt, adapter, items)

    def close(self) -> None:
        """Stop all timers: the engine is closed."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _change(
        self,
        transition: Callable[..., tuple[int, Effects]],
        tokens: TokenIds,
        salt: str,
        adapter: str,
        items: Sequence[Item],
        *more: Any,
    ) -> int:
        """Make a transition on the cached blocks of a prompt; return their number of tokens."""
        self._lifetime.check_open()
        context = context_of(checks.text("salt", salt), checks.text("adapter", adapter))
        blocks: int = self._apply(transition(as_tokens(tokens), context, as_items(items), *more))
        return blocks * self._block_tokens

    def _end_after(self, seconds: float) -> int:
        """Return the end of a retention, up to an eighth or a second later than asked.

        So few ends are different, however many prompts are retained.
        """
        unit: int = 2 ** max(0, math.frexp(seconds / 8)[1] - 1)
        return math.ceil((self._lifetime.loop.time() + seconds) / unit) * unit

    def _end(self, end: int) -> None:
        del self._timers[end]
        if self._lifetime.is_usable:
            self._apply(self._scheduler.retention.end_at(end))
