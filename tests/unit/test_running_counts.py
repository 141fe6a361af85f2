"""RouteCounts: time in which at least one transfer of a route is in flight, and its bytes."""

from __future__ import annotations

import pytest

from aiokv.worker.lanes import RouteCounts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_overlapping_transfers_are_busy_once(clock: Clock) -> None:
    counts = RouteCounts(clock)
    counts.begin()
    clock.now = 1.0
    counts.begin()
    clock.now = 2.0
    counts.end("done", 300, 0.5)
    assert counts.statistics().submitted == 1
    assert counts.statistics().busy_seconds == 0.0, "one is in flight still"
    clock.now = 3.0
    counts.end("failed", 0, 0.5)
    clock.now = 10.0
    counts.begin()
    clock.now = 11.0
    counts.end("cancelled", 0, 0.5)
    statistics = counts.statistics()
    assert (statistics.done, statistics.failed, statistics.cancelled) == (1, 1, 1)
    assert (statistics.submitted, statistics.moved_bytes) == (0, 300)
    assert (statistics.busy_seconds, statistics.bytes_per_second) == (4.0, 75.0)
    assert statistics.queue_seconds == 0.0


def test_counts_without_a_transfer_are_zeros(clock: Clock) -> None:
    statistics = RouteCounts(clock).statistics()
    assert (statistics.busy_seconds, statistics.bytes_per_second, statistics.done) == (0.0, 0.0, 0)
