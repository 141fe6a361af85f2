"""RequestCounts: waits of requests, and how those ended, over all leases of an engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv._native import Histogram
from aiokv.base.statistics import DurationHistogram, RequestStatistics
from aiokv.errors import RequestTooLarge

if TYPE_CHECKING:
    from aiokv.engine.speed import PrefillSpeed
    from aiokv.scheduler.reader import CacheReader


class RequestCounts:
    """Counters and histograms of :class:`RequestStatistics`.

    Args:
        read: has the times for which leases had blocks.
        speed: measures the speed of the model.

    Attributes:
        capacity_wait: as in :class:`RequestStatistics`, and so are the others.
    """

    def __init__(self, read: CacheReader, speed: PrefillSpeed) -> None:
        self._read = read
        self._speed = speed
        self.capacity_wait = Histogram()
        self.pending_wait = Histogram()
        self.store_wait = Histogram()
        self.peer_wait = Histogram()
        self.onload = Histogram()
        self._timed_out_waits = 0
        self._cancelled_waits = 0
        self._refused_waits = 0
        self._too_large_requests = 0
        self._declined_fetches = 0
        self._late_fetches = 0

    def note_timeout(self) -> None:
        """Count an ``allocate`` whose timeout has passed."""
        self._timed_out_waits += 1

    def note_error(self, error: BaseException) -> None:
        """Count an ``allocate`` that raises another error."""
        if isinstance(error, RequestTooLarge):
            self._too_large_requests += 1
        elif isinstance(error, asyncio.CancelledError):
            self._cancelled_waits += 1
        else:
            self._refused_waits += 1

    def note_declined_fetch(self) -> None:
        """Count a request that computes blocks that a store has, because this is sooner."""
        self._declined_fetches += 1

    def note_late_fetch(self) -> None:
        """Count a request that has stopped waiting for a late fetch."""
        self._late_fetches += 1

    def statistics(self) -> RequestStatistics:
        """Return the counts so far."""
        return RequestStatistics(
            capacity_wait=DurationHistogram.of(self.capacity_wait),
            pending_wait=DurationHistogram.of(self.pending_wait),
            store_wait=DurationHistogram.of(self.store_wait),
            peer_wait=DurationHistogram.of(self.peer_wait),
            onload=DurationHistogram.of(self.onload),
            hold=self._read.hold_times(),
            timed_out_waits=self._timed_out_waits,
            cancelled_waits=self._cancelled_waits,
            refused_waits=self._refused_waits,
            too_large_requests=self._too_large_requests,
            declined_fetches=self._declined_fetches,
            late_fetches=self._late_fetches,
            prefill_tokens_per_second=self._speed.tokens_per_second,
        )
