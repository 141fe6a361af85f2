"""The benches run: each gives numbers, and those that check conservation find nothing missing."""

from __future__ import annotations

import importlib
import math

import pytest

from bench import harness, redis_store


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "digest",
        "policy",
        "admission",
        "fetch_or_compute",
        "cancel_storm",
        "shutdown",
        "ranks",
        "loop_held",
        "sync",
        "fastdeploy",
        "peers_transports",
        "disk_io",
        "disk",
        "peers_tcp",
        "peers",
    ],
)
def test_bench_returns_finite_comparable_numbers(name):
    numbers = harness.flatten(importlib.import_module(f"bench.{name}").run(quick=True))
    assert all(math.isfinite(value) for value in numbers.values())
    assert any(harness.better(metric) for metric in numbers)


@pytest.mark.skipif(not redis_store.find_program(), reason="no redis-server; `make services`")
def test_bench_of_the_redis_store_returns_numbers():
    pytest.importorskip("redis", reason="redis-py is not installed; `make services`")
    numbers = harness.flatten(redis_store.run(quick=True))
    assert all(math.isfinite(value) for value in numbers.values())
    assert any(harness.better(metric) for metric in numbers)
