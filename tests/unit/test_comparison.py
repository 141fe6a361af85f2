"""Comparison: number of blocks to fetch, and the time after which a fetch is late."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.engine.comparison import PATIENCE, Comparison, rest_of

BLOCK_TOKENS = 16
TOKENS_PER_SECOND = 1_600.0  # 10 ms per block


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def comparison(*, queued_blocks: int = 0, clock: Time | None = None) -> Comparison:
    clock = Time() if clock is None else clock
    return Comparison(TOKENS_PER_SECOND, BLOCK_TOKENS, clock, queued_blocks * BLOCK_TOKENS)


def seconds(per_block: float, blocks: int = 100, *, latency: float = 0.0) -> np.ndarray:
    return latency + per_block * np.arange(1, blocks + 1)


@pytest.mark.parametrize(
    ("per_block", "latency", "fetches"),
    [
        (0.009, 0.0, True),
        (0.011, 0.0, False),
        (0.005, 0.4, True),  # 0.9 s for what takes 1 s to compute
        (0.005, 0.6, False),
    ],
)
def test_prompt_is_fetched_if_fetching_is_sooner(per_block, latency, fetches):
    part = comparison().next_part(seconds(per_block, latency=latency))
    assert (part.work > 0) == fetches
    assert (part.blocks > 0) == fetches
    if fetches:
        assert part.work == pytest.approx(100 * per_block + latency)


def test_fetches_before_this_one_count():
    offer = seconds(0.005)
    assert comparison().next_part(offer, wait=0.4).blocks > 0
    assert comparison().next_part(offer, wait=0.6).blocks == 0


def test_blocks_that_arrive_before_the_model_is_free_are_fetched():
    clock = Time()
    busy = comparison(queued_blocks=50, clock=clock)  # free in 0.5 s
    part = busy.next_part(seconds(0.02))
    assert part.work == pytest.approx(0.5)  # 25 of 100 blocks
    clock.now += 0.4
    assert busy.next_part(seconds(0.02)).work == pytest.approx(0.1)
    clock.now += 0.2
    assert busy.next_part(seconds(0.02)).blocks == 0


def test_queue_of_the_model_lets_a_prompt_wait_for_other_fetches():
    offer = seconds(0.005)
    assert comparison(queued_blocks=30).next_part(offer, wait=0.75).blocks > 0
    assert comparison(queued_blocks=30).next_part(offer, wait=0.85).blocks == 0


def test_fetch_has_parts_of_equal_size():
    race = comparison()
    offer = seconds(0.005)
    sizes = []
    while (part := race.next_part(offer)).blocks:
        sizes.append(part.blocks)
        offer = rest_of(offer, part.blocks, part.seconds)
    assert sizes == [25] * 4


def test_first_fetch_of_a_store_begins_with_a_small_part():
    assert comparison().next_part(np.zeros(96)).blocks == 12
    assert comparison().next_part(np.zeros(3)).blocks == 2  # 20 ms of computing
    assert comparison().next_part(np.zeros(1)).blocks == 1
    assert comparison().next_part(np.zeros(0)).blocks == 0


def test_parts_take_several_times_the_latency_of_the_store():
    part = comparison().next_part(seconds(0.001, latency=0.02))
    assert part.seconds >= 4 * 0.02


@pytest.mark.parametrize(("elapsed", "left"), [(0.1, 0.3), (0.05, 0.3), (0.2, 0.6)])
def test_slow_part_raises_the_expected_time_of_the_rest(elapsed, left):
    """A fast part may have come from a cache, so it does not lower the expected time."""
    rest = rest_of(seconds(0.004), 25, elapsed)
    assert len(rest) == 75
    assert rest[-1] == pytest.approx(left)


def test_first_part_measures_a_store():
    rest = rest_of(np.zeros(96), 12, 0.24)
    assert rest[0] == pytest.approx(0.02)
    assert rest[-1] == pytest.approx(84 * 0.02)
    assert comparison().next_part(rest).blocks == 0


def test_part_is_late_when_computing_would_have_been_sooner():
    assert comparison().patience(25, 0.1) == pytest.approx(PATIENCE * 0.25)
    assert comparison().patience(25, 0.4) == pytest.approx(PATIENCE * 0.4)
    assert comparison(queued_blocks=50).patience(25, 0.1) == pytest.approx(0.5 + PATIENCE * 0.25)
