"""Transfers of the cores that the bench of two tiers serves."""

from __future__ import annotations

import pytest

from bench import two_tiers
from tests.harness.trace_families import generate_family
from tests.harness.traces import trace_prompts


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
@pytest.mark.parametrize("policy", ["write_through", "nth_use:2", "write_back"])
def test_blocks_are_saved_in_few_transfers(policy, eviction):
    """Scores rank a parent before its children, so that most of a chain is deferred."""
    prompts = trace_prompts(generate_family("chat", 400, seed=3))
    row = two_tiers.serve(prompts, 1_500, 6_000, policy, eviction)
    assert row["host_hit_tokens"] > 0
    assert row["transfers_per_request"] <= 3
