"""The benches of vLLM's scheduler run, where vLLM is installed."""

from __future__ import annotations

import math

import pytest

from bench import harness


def test_bench_returns_finite_comparable_numbers() -> None:
    bench = pytest.importorskip("bench.vllm_scheduler", exc_type=ImportError)
    numbers = harness.flatten(bench.run(quick=True))
    assert all(math.isfinite(value) for value in numbers.values())
    assert all(harness.better(metric) == "lower" for metric in numbers)


def test_host_memory_adds_hits_to_those_of_the_device() -> None:
    bench = pytest.importorskip("bench.vllm_hits", exc_type=ImportError)
    shares = bench.run(quick=True)["hit_share_1_clients"]
    assert 0 < shares["device"] < shares["both"] <= shares["sum"]
