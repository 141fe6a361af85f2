"""Cost: latency, and bandwidth that several batches share."""

from __future__ import annotations

import pytest

from aiokv.stores.cost import (
    LATE_FACTOR,
    LATE_SECONDS,
    LATENCY_BLOCKS,
    LATENCY_BYTES,
    WINDOW,
    Cost,
)

KIB, MIB = 1 << 10, 1 << 20


class Store:
    """A store whose batches follow one another, on a clock that the test sets."""

    def __init__(self) -> None:
        self.cost = Cost()
        self.now = 10.0

    def move(self, num_bytes: int, seconds: float, *, times: int = 1, idle: float = 0.0) -> None:
        for _ in range(times):
            batch = self.cost.begin(num_bytes, self.now)
            self.now += seconds
            batch.note(num_bytes, num_bytes, self.now)
            batch.end()
            self.now += idle

    def expected(self, num_bytes: int) -> float:
        latency, per_byte = self.cost.parts(self.now)
        return latency + num_bytes * per_byte


def test_estimates_are_zero_before_the_first_batch():
    assert Cost().parts(5.0) == (0.0, 0.0)
    assert (Cost().bytes_per_second, Cost().latency_seconds) == (0.0, 0.0)


def test_small_batches_measure_the_latency():
    store = Store()
    store.move(LATENCY_BYTES - 1, 0.1, times=2)
    assert store.cost.parts(30.0) == (pytest.approx(0.1), 0.0)


def test_few_bytes_in_many_blocks_measure_the_bandwidth():
    for num_blocks, expected in (
        (LATENCY_BLOCKS, (0.1, 0.0)),
        (LATENCY_BLOCKS + 1, (0.0, 0.1 / KIB)),
    ):
        cost = Cost()
        batch = cost.begin(KIB, 10.0, num_blocks)
        batch.note(KIB, KIB, 10.1)
        batch.end()
        assert cost.parts(20.0) == (pytest.approx(expected[0]), pytest.approx(expected[1]))


def test_batches_at_the_same_time_share_the_bandwidth():
    cost = Cost()
    batches = [cost.begin(100 * MIB, 10.0) for _ in range(4)]
    for batch in batches:  # all end at the same time
        batch.note(100 * MIB, 100 * MIB, 14.0)
        batch.end()
    assert cost.bytes_per_second == pytest.approx(100 * MIB)
    batch = cost.begin(100 * MIB, 20.0)  # the idle time before it does not count
    batch.note(100 * MIB, 100 * MIB, 21.0)
    batch.end()
    assert cost.bytes_per_second == pytest.approx(100 * MIB)


def test_unequal_batches_at_the_same_time_have_one_bandwidth():
    cost = Cost()
    short, long = cost.begin(10 * MIB, 10.0), cost.begin(90 * MIB, 10.0)
    short.note(10 * MIB, 10 * MIB, 10.2)  # both at 50 MiB/s
    short.end()
    assert cost.bytes_per_second == pytest.approx(100 * MIB)
    long.note(90 * MIB, 90 * MIB, 11.0)
    long.end()
    assert cost.bytes_per_second == pytest.approx(100 * MIB)


def test_operations_of_one_batch_are_measured_one_by_one():
    cost = Cost()
    batch = cost.begin(300 * MIB, 10.0)
    for now in (11.0, 12.0, 13.0):
        batch.note(100 * MIB, 100 * MIB, now)
    batch.end()
    assert cost.bytes_per_second == pytest.approx(100 * MIB)


def test_batch_in_flight_counts_when_it_is_late():
    cost = Cost()
    batch = cost.begin(100 * MIB, 10.0)
    batch.note(100 * MIB, 100 * MIB, 11.0)
    batch.end()
    cost.begin(100 * MIB, 20.0)
    assert cost.parts(20.9)[1] == pytest.approx(1.0 / (100 * MIB))
    assert cost.parts(24.0)[1] == pytest.approx(4.0 / (100 * MIB))


def test_small_batch_in_flight_counts_when_it_is_late():
    store = Store()
    store.move(KIB, 0.1)
    store.cost.begin(KIB, 20.0)
    assert store.cost.parts(20.05)[0] == pytest.approx(0.1)
    assert store.cost.parts(24.0)[0] == pytest.approx(4.0)


@pytest.mark.parametrize("num_bytes", [KIB, MIB])
def test_batch_is_late_after_a_multiple_of_its_expected_time(num_bytes):
    store = Store()
    store.move(num_bytes, 1.0)
    began = store.now
    batch = store.cost.begin(num_bytes, began)
    limit = began + LATE_FACTOR * 1.0 + LATE_SECONDS
    assert not store.cost.is_late(limit - 0.01)
    assert store.cost.is_late(limit + 0.01)
    batch.end()
    assert not store.cost.is_late(limit + 0.01)


@pytest.mark.parametrize("num_bytes", [KIB, MIB])
@pytest.mark.parametrize("moves", [True, False])
def test_one_slow_batch_has_hardly_an_effect(num_bytes, moves):
    store = Store()
    store.move(num_bytes, 0.001, times=20)
    batch = store.cost.begin(num_bytes, store.now)
    store.now += 5.0
    batch.note(num_bytes, num_bytes if moves else 0, store.now)
    batch.end()
    assert store.expected(num_bytes) < 0.003
    store.move(num_bytes, 0.001, times=5)
    assert store.expected(num_bytes) < 0.0015


@pytest.mark.parametrize("num_bytes", [KIB, MIB])
def test_store_that_has_become_slow_is_measured_as_slow(num_bytes):
    store = Store()
    store.move(num_bytes, 0.001, times=100)
    store.move(num_bytes, 1.0, times=WINDOW)
    assert store.expected(num_bytes) == pytest.approx(1.0)


@pytest.mark.parametrize("num_bytes", [KIB, MIB])
def test_old_measurements_fade(num_bytes):
    store = Store()
    store.move(num_bytes, 1.0, times=100)
    store.now += 60.0
    assert store.expected(num_bytes) == pytest.approx(1.0)  # until there is a new one
    store.move(num_bytes, 0.001)
    assert store.expected(num_bytes) < 0.01


def test_first_batch_of_a_store_that_hangs_is_corrected_by_the_next_one():
    store = Store()
    store.move(MIB, 5.0)
    store.move(MIB, 0.001)
    assert store.expected(MIB) < 0.005


def test_small_batches_bound_the_time_of_a_byte():
    store = Store()
    store.move(MIB, 1.0, times=WINDOW)
    store.move(192 * KIB, 0.0005, times=WINDOW)
    assert store.cost.bytes_per_second == pytest.approx(192 * KIB / 0.0005)
    store.move(MIB, 0.001, times=WINDOW)
    before = store.cost.bytes_per_second
    store.move(KIB, 0.0005, times=WINDOW)  # slower per byte: this is the latency
    assert store.cost.bytes_per_second == before


def test_large_batches_bound_the_latency():
    store = Store()
    store.move(KIB, 1.0, times=WINDOW)
    store.move(MIB, 0.01, times=WINDOW)
    assert store.cost.latency_seconds == pytest.approx(0.01)


def test_bytes_of_a_batch_that_ended_early_are_not_in_flight():
    cost = Cost()
    batch = cost.begin(300 * MIB, 10.0)
    batch.note(100 * MIB, 100 * MIB, 11.0)
    batch.end()  # the breaker of the store has opened
    assert cost.parts(1_000.0)[1] == pytest.approx(1.0 / (100 * MIB))
