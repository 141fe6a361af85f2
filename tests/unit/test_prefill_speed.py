"""PrefillSpeed and ComputeTimes: the model's speed, from its batches and what they compute."""

from __future__ import annotations

import pytest

from aiokv.engine import speed as speed_module
from aiokv.engine.compute_times import BatchTimes, StepTimes
from aiokv.engine.speed import WINDOW, PrefillSpeed

TOKENS = 1_600
SECONDS = 0.5
SPEED = TOKENS / SECONDS


class Batches:
    """Batches, and steps of one batch, at times that the test sets."""

    def __init__(self, known: float | None = None) -> None:
        self.now = 100.0
        self.number = 0
        self.committed = 0
        self.speed = PrefillSpeed(known)
        self.times = BatchTimes(self.speed, lambda: self.committed, lambda: self.now)

    def begin(self, *, waits: bool = False) -> int:
        self.number += 1
        self.times.batch_begins(self.number, waits=waits)
        return self.number

    def end(self, number: int) -> None:
        self.times.batch_ends(number)

    def compute(
        self, tokens: int, seconds: float, *, idle: float = 0.0, waits: bool = False
    ) -> None:
        number = self.begin(waits=waits)
        self.now += seconds
        self.end(number)
        self.committed += tokens
        self.now += idle


class Steps(Batches):
    """Steps of a device that computes in a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.times = StepTimes(self.speed, lambda: self.committed, lambda: self.now)

    def submit(self, tokens: int, *, waits: bool = False) -> int:
        """Submit one batch in a step of its own; return the number of the step."""
        self.end(self.begin(waits=waits))
        self.committed += tokens
        self.times.step_closes(self.number)
        return self.number


def noted(*batches: tuple[int, float]) -> float:
    """Return the estimate after these batches: tokens and seconds of each."""
    speed = PrefillSpeed(None)
    for tokens, seconds in batches:
        speed.note(tokens, seconds)
    return speed.tokens_per_second


# --- times of batches -----------------------------------------------------------------------------


def test_speed_is_known_after_the_batch_that_follows():
    batches = Batches()
    batches.compute(TOKENS, SECONDS, idle=9.0)
    assert batches.speed.tokens_per_second == 0.0
    batches.compute(16, 0.1)
    assert batches.speed.tokens_per_second == pytest.approx(SPEED)


def test_decode_batches_do_not_count():
    batches = Batches()
    batches.compute(TOKENS, SECONDS)
    for _ in range(100):
        batches.compute(16, 0.5)
    assert batches.speed.tokens_per_second == pytest.approx(SPEED)


def test_time_without_a_batch_does_not_count():
    batches = Batches()
    for _ in range(10):
        batches.compute(TOKENS, SECONDS, idle=60.0)
    assert batches.speed.tokens_per_second == pytest.approx(SPEED)


def test_batches_in_flight_together_share_the_time():
    batches = Batches()
    running = batches.begin()
    for _ in range(5):  # the next batch begins before the tokens of the last one are committed
        following = batches.begin()
        batches.now += SECONDS
        batches.end(running)
        batches.committed += TOKENS
        running = following
    batches.begin()
    assert batches.speed.tokens_per_second == pytest.approx(SPEED)


def test_batch_that_waits_for_onloads_does_not_count():
    batches = Batches()
    batches.compute(TOKENS, SECONDS)
    for _ in range(WINDOW):
        batches.compute(TOKENS, 60.0, waits=True)
    batches.compute(TOKENS, SECONDS)
    assert batches.speed.tokens_per_second == pytest.approx(SPEED)


def test_configured_speed_is_taken_as_it_is():
    batches = Batches(1234.0)
    batches.compute(TOKENS, SECONDS)
    batches.compute(TOKENS, SECONDS)
    assert batches.speed.tokens_per_second == 1234.0


# --- times of steps -------------------------------------------------------------------------------


def test_step_takes_the_time_until_its_event_is_done():
    steps = Steps()
    for _ in range(10):
        step = steps.submit(TOKENS)
        steps.now += SECONDS
        steps.times.step_finished(step)
        steps.now += 60.0
    assert steps.speed.tokens_per_second == pytest.approx(SPEED)


def test_step_that_was_submitted_ahead_begins_at_the_end_of_the_one_before():
    steps = Steps()
    running = steps.submit(TOKENS)
    for _ in range(5):
        following = steps.submit(TOKENS)
        steps.now += SECONDS
        steps.times.step_finished(running)
        running = following
    assert steps.speed.tokens_per_second == pytest.approx(SPEED)


def test_steps_that_finish_together_share_the_time():
    steps = Steps()
    steps.submit(TOKENS)
    last = steps.submit(TOKENS)
    steps.now += 2 * SECONDS
    steps.times.step_finished(last)
    assert steps.speed.tokens_per_second == pytest.approx(SPEED)
    steps.times.step_finished(last)  # repeated after an interrupt
    assert steps.speed.tokens_per_second == pytest.approx(SPEED)


def test_step_that_waits_for_onloads_does_not_count():
    steps = Steps()
    for waits, seconds in ((False, SECONDS), *((True, 60.0),) * WINDOW):
        step = steps.submit(TOKENS, waits=waits)
        steps.now += seconds
        steps.times.step_finished(step)
    assert steps.speed.tokens_per_second == pytest.approx(SPEED)


# --- the estimate ---------------------------------------------------------------------------------


def test_batches_that_the_caller_has_measured_count():
    speed = PrefillSpeed(None)
    speed.note(1_600, 0.5)
    assert speed.tokens_per_second == pytest.approx(3200)
    speed.note(speed_module.LEAST_TOKENS - 1, 9.0)  # decodes
    assert speed.tokens_per_second == pytest.approx(3200)
    for _ in range(40):
        speed.note(3_200, 0.5)
    assert speed.tokens_per_second == pytest.approx(6400, rel=1e-3)


@pytest.mark.parametrize("slow_every", [2, 3, 5])
def test_estimate_is_the_speed_of_a_prompt_that_needs_fast_and_slow_batches(slow_every):
    batches = [(8_000, 0.4 if i % slow_every == 0 else 0.16) for i in range(WINDOW)]
    seconds = sum(seconds for _, seconds in batches)
    assert noted(*batches) == pytest.approx(8_000 * WINDOW / seconds)


def test_order_of_batches_makes_no_difference():
    fast, slow = [(8_000, 0.16)] * (WINDOW // 2), [(8_000, 0.32)] * (WINDOW // 2)
    assert noted(*fast, *slow) == pytest.approx(noted(*slow, *fast))


def test_batches_count_by_their_tokens():
    assert noted(*[(8_000, 0.2), (2_000, 0.1)] * 10) == pytest.approx(10_000 / 0.3)


@pytest.mark.parametrize("seconds", [60.0, 0.001])
def test_rare_batches_of_any_duration_have_no_effect(seconds):
    batches = [(TOKENS, SECONDS)] * (WINDOW - 3) + [(TOKENS, seconds)] * 3
    assert noted(*batches) == pytest.approx(SPEED)


@pytest.mark.parametrize("seconds", [60.0, 0.001])
def test_extreme_batch_among_few_has_a_bounded_effect(seconds):
    assert SPEED / 2 < noted((TOKENS, seconds), *[(TOKENS, SECONDS)] * 3) < SPEED * 2


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
def test_estimate_follows_a_change_of_the_load(factor):
    speed = PrefillSpeed(None)
    for _ in range(10 * WINDOW):
        speed.note(TOKENS, SECONDS)
    for i in range(WINDOW):
        speed.note(TOKENS, SECONDS / factor)
        if i == WINDOW // 2:
            assert min(1, factor) < speed.tokens_per_second / SPEED < max(1, factor)
    assert speed.tokens_per_second == pytest.approx(factor * SPEED)


def test_small_batches_beside_large_ones_do_not_count():
    batches = [(8_000, 0.2), *[(256, 0.016)] * (WINDOW - 1)]
    assert noted(*batches) == pytest.approx(40_000)
    assert noted(*batches[1:]) == pytest.approx(16_000)
