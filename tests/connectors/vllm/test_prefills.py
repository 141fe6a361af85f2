"""PrefillClock: times of vLLM's steps, and what follows for stores."""

from __future__ import annotations

import pytest

from aiokv.connectors.prefills import LEAST_TOKENS, PrefillClock
from aiokv.connectors.vllm.options import Options


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only element is the time."""
    time = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: time[0])
    return time


def test_step_takes_the_time_from_its_message_to_its_end(now: list[float]) -> None:
    clock = PrefillClock()
    clock.begin(1, 4_096)
    now[0] = 100.5
    assert clock.end(1) == (4_096, pytest.approx(0.5))
    assert clock.end(1) is None


def test_step_that_was_built_ahead_begins_at_the_end_of_the_one_before(now: list[float]) -> None:
    clock = PrefillClock()
    clock.begin(1, 2_048)
    now[0] = 100.1
    clock.begin(2, 4_096)
    now[0] = 101.0
    assert clock.end(1) == (2_048, pytest.approx(1.0))
    now[0] = 101.25
    assert clock.end(2) == (4_096, pytest.approx(0.25))


def test_steps_whose_ends_were_not_noticed_count_together(now: list[float]) -> None:
    clock = PrefillClock()
    clock.begin(1, 2_048)
    clock.begin(2, 4_096)
    now[0] = 101.5
    assert clock.end(2) == (6_144, pytest.approx(1.5))
    assert clock.end(2) is None


def test_small_steps_are_no_measure_but_end_what_came_before(now: list[float]) -> None:
    clock = PrefillClock()
    clock.begin(1, LEAST_TOKENS - 1)
    clock.begin(2, LEAST_TOKENS)
    now[0] = 101.0
    assert clock.end(1) is None
    now[0] = 102.0
    assert clock.end(2) == (LEAST_TOKENS, pytest.approx(1.0))


def test_known_speed_is_an_option() -> None:
    options = Options.parse({"host_gib": 1, "prefill_tokens_per_second": 3e4})
    assert options.prefill_tokens_per_second == 3e4
