"""PrefillSpeed: the model's speed, from batches and the blocks that they publish."""

from __future__ import annotations

import pytest

from aiokv.engine import speed as speed_module
from aiokv.engine.speed import PrefillSpeed


class Batches:
    """Batches at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: float | None = None) -> None:
        self.now = 100.0
        self.number = 0
        self.speed = PrefillSpeed(known, 16)
        monkeypatch.setattr(speed_module.time, "monotonic", lambda: self.now)

    def compute(self, blocks: int, seconds: float, *, idle: float = 0.0, ends: bool = True) -> None:
        self.number += 1
        self.speed.batch_begins(self.number)
        self.now += seconds
        if ends:
            self.speed.batch_ends(self.number)
        self.speed.published(blocks)
        self.now += idle


def test_speed_is_known_after_the_batch_that_follows(monkeypatch):
    batches = Batches(monkeypatch)
    batches.compute(100, 0.5, idle=9.0)
    assert batches.speed.tokens_per_second == 0.0
    batches.compute(1, 0.1)
    assert batches.speed.tokens_per_second == pytest.approx(3200)


def test_decode_batches_do_not_count(monkeypatch):
    batches = Batches(monkeypatch)
    batches.compute(100, 0.5)
    for _ in range(100):
        batches.compute(1, 0.5)
    assert batches.speed.tokens_per_second == pytest.approx(3200)


def test_batch_without_an_end_takes_until_the_next_and_pauses_weigh_little(monkeypatch):
    batches = Batches(monkeypatch)
    for _ in range(10):
        batches.compute(100, 0.5, ends=False)
    assert batches.speed.tokens_per_second == pytest.approx(3200)
    batches.compute(100, 0.5, idle=60.0, ends=False)
    batches.compute(1, 0.1)
    assert 3000 < batches.speed.tokens_per_second < 3200


def test_configured_speed_is_taken_as_it_is(monkeypatch):
    batches = Batches(monkeypatch, 1234.0)
    batches.compute(100, 0.5)
    batches.compute(100, 0.5)
    assert batches.speed.tokens_per_second == 1234.0


def test_batches_that_the_caller_has_measured_count():
    speed = PrefillSpeed(None, 16)
    speed.note(1_600, 0.5)
    assert speed.tokens_per_second == pytest.approx(3200)
    speed.note(speed_module.LEAST_TOKENS - 1, 9.0)  # decodes
    assert speed.tokens_per_second == pytest.approx(3200)
    for _ in range(40):
        speed.note(3_200, 0.5)
    assert speed.tokens_per_second == pytest.approx(6400, rel=1e-3)
