"""The benches run: each gives numbers, and those that check conservation find nothing missing."""

from __future__ import annotations

import importlib
import math

import pytest

from bench import harness, peers_transports, redis_store


@pytest.mark.parametrize(
    "name",
    [
        "index",
        "index_ratio",
        "miss_history",
        "digest",
        "policy",
        "admission",
        "fetch_or_compute",
        "cancel_storm",
        "shutdown",
        "ranks",
        "loop_held",
        "reset",
        "sync",
        "steps",
        "fastdeploy",
        "disk_io",
        "disk",
        "peers_tcp",
        "peers",
    ],
)
def test_bench_returns_finite_comparable_numbers(name):
    _check(importlib.import_module(f"bench.{name}").run(quick=True))


def _check(results):
    numbers = harness.flatten(results)
    assert all(math.isfinite(value) for value in numbers.values())
    assert any(harness.better(metric) for metric in numbers)


def test_bench_of_one_sided_transports_returns_numbers_of_those_that_are_installed():
    results = peers_transports.run(quick=True)
    if not results:
        pytest.skip("neither NIXL nor Mooncake is installed; `make services`")
    _check(results)


@pytest.mark.skipif(not redis_store.find_program(), reason="no redis-server; `make services`")
def test_bench_of_the_redis_store_returns_numbers():
    pytest.importorskip("redis", reason="redis-py is not installed; `make services`")
    _check(redis_store.run(quick=True))
