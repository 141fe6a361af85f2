"""The bench of vLLM's scheduler runs, where vLLM is installed."""

from __future__ import annotations

import math

import pytest

from bench import harness


def test_bench_returns_finite_comparable_numbers() -> None:
    bench = pytest.importorskip("bench.vllm_scheduler", exc_type=ImportError)
    numbers = harness.flatten(bench.run(quick=True))
    assert all(math.isfinite(value) for value in numbers.values())
    assert all(harness.better(metric) == "lower" for metric in numbers)
