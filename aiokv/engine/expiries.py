"""Expiries: timers of granted leases that the engine releases unless they are used in time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.base.types import LeaseIds
    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.lifetime import Lifetime


class Expiries:
    """Timers of leases, by lease id. They keep no lease from being garbage-collected.

    Attributes:
        timers: timers that run; empty when no lease has one.
    """

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._on_expiry: Callable[[LeaseRecord, float], None] = lambda record, seconds: None
        self.timers: dict[int, asyncio.TimerHandle] = {}

    def tell_expired(self, callback: Callable[[LeaseRecord, float], None]) -> None:
        """Call ``callback(record, seconds)`` for each lease whose timer has run for ``seconds``."""
        self._on_expiry = callback

    def start(self, record: LeaseRecord, seconds: float) -> None:
        """Start the timer of a lease, in place of an earlier one; infinite seconds never end."""
        self.stop(record.id)
        if seconds < math.inf:
            loop = self._lifetime.loop
            self.timers[record.id] = loop.call_later(seconds, self._end, record, seconds)

    def stop(self, lease_id: int) -> None:
        """Stop the timer of a lease. Idempotent."""
        if (timer := self.timers.pop(lease_id, None)) is not None:
            timer.cancel()

    def stop_all(self, lease_ids: LeaseIds) -> None:
        """Stop the timers of these leases. Idempotent."""
        for lease_id in lease_ids:
            self.stop(int(lease_id))

    def close(self) -> None:
        """Stop all timers: the engine is closed."""
        for lease_id in list(self.timers):
            self.stop(lease_id)

    def _end(self, record: LeaseRecord, seconds: float) -> None:
        self.timers.pop(record.number, None)
        if record.id and self._lifetime.is_running:
            self._on_expiry(record, seconds)
