"""The benches run: each gives numbers, and those that check conservation find nothing missing."""

from __future__ import annotations

import importlib
import math

import pytest

from bench import harness


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "digest",
        "policy",
        "admission",
        "cancel_storm",
        "shutdown",
        "ranks",
        "loop_held",
        "disk_io",
        "disk",
    ],
)
def test_bench_returns_finite_comparable_numbers(name):
    numbers = harness.flatten(importlib.import_module(f"bench.{name}").run(quick=True))
    assert all(math.isfinite(value) for value in numbers.values())
    assert any(harness.better(metric) for metric in numbers)
