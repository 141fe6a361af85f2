"""Cost: bandwidth of a store that several batches share."""

from __future__ import annotations

import pytest

from aiokv.stores.cost import LATENCY_BYTES, WEIGHT, Cost

MIB = 1 << 20


def test_estimates_are_zero_before_the_first_batch():
    assert Cost().parts(5.0) == (0.0, 0.0)
    assert Cost().bytes_per_second == 0.0


def test_small_batches_measure_the_latency():
    cost = Cost()
    for began in (10.0, 20.0):
        batch = cost.begin(LATENCY_BYTES - 1, began)
        batch.note(LATENCY_BYTES - 1, LATENCY_BYTES - 1, began + 0.1)
        batch.end()
    assert cost.parts(30.0) == (pytest.approx(0.1), 0.0)


def test_batches_at_the_same_time_share_the_bandwidth():
    cost = Cost()
    batches = [cost.begin(100 * MIB, 10.0) for _ in range(4)]
    for number, batch in enumerate(batches):  # all end at about the same time
        batch.note(100 * MIB, 100 * MIB, 14.0 + number * 1e-6)
        batch.end()
    # The first batch to end is charged all of the time, and has a smaller weight than the last.
    shares = [(1 - WEIGHT) ** (3 - number) for number in range(4)]
    expected = sum(shares) * 100 * MIB / (4.0 * shares[0])
    assert cost.bytes_per_second == pytest.approx(expected, rel=1e-3)
    batch = cost.begin(100 * MIB, 20.0)  # the idle time before it does not count
    batch.note(100 * MIB, 100 * MIB, 21.0)
    batch.end()
    assert cost.bytes_per_second > 80 * MIB


def test_batch_in_flight_counts_when_it_is_late():
    cost = Cost()
    batch = cost.begin(100 * MIB, 10.0)
    batch.note(100 * MIB, 100 * MIB, 11.0)
    batch.end()
    cost.begin(100 * MIB, 20.0)
    assert cost.parts(20.9)[1] == pytest.approx(1.0 / (100 * MIB))
    assert cost.parts(24.0)[1] == pytest.approx(4.0 / (100 * MIB))


def test_operation_that_moves_nothing_makes_the_store_slow():
    cost = Cost()
    for began, moved in ((10.0, 100 * MIB), (20.0, 0)):
        batch = cost.begin(100 * MIB, began)
        batch.note(100 * MIB, moved, began + 1.0)
        batch.end()
    assert cost.bytes_per_second == pytest.approx((1 - WEIGHT) * 100 * MIB / (2 - WEIGHT))


def test_estimate_holds_until_the_next_batch_and_then_recovers():
    cost = Cost()
    batch = cost.begin(100 * MIB, 10.0)
    batch.note(100 * MIB, 100 * MIB, 15.0)
    batch.end()
    assert cost.parts(1e6)[1] == cost.parts(16.0)[1]
    for number in range(20):
        batch = cost.begin(100 * MIB, 20.0 + number)
        batch.note(100 * MIB, 100 * MIB, 20.1 + number)
        batch.end()
    assert cost.bytes_per_second > 500 * MIB


def test_bytes_of_a_batch_that_ended_early_are_not_in_flight():
    cost = Cost()
    batch = cost.begin(300 * MIB, 10.0)
    batch.note(100 * MIB, 100 * MIB, 11.0)
    batch.end()  # the breaker of the store has opened
    assert cost.parts(1_000.0)[1] == pytest.approx(1.0 / (100 * MIB))
