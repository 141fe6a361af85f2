"""Labels of released requests: true ones add hits, useless and wrong ones cost at most 2 %."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.config.cache_config import CacheConfig
from aiokv.scheduler.plans import new_core
from tests.harness.trace_families import FAMILIES, generate_family
from tests.harness.traces import hit_tokens, trace_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv._native import Core
    from aiokv.trace.format import TraceRequest

CAPACITIES = (150, 600)


def true_labels(requests: Sequence[TraceRequest]) -> list[str]:
    """Return, per request, whether a later one has all of its full blocks."""
    later: set[int] = set()
    labels = []
    for request in reversed(requests):
        full = request.hash_ids[: request.input_tokens // 512]
        labels.append("returns" if full and full[-1] in later else "ends")
        later.update(full)
    return labels[::-1]


def wrong(label: str) -> str:
    return "ends" if label == "returns" else "returns"


LIES: dict[str, Callable[[list[str], Random], list[str]]] = {
    "equal": lambda true, rng: ["turn"] * len(true),
    "random": lambda true, rng: [rng.choice("abcd") for _ in true],
    "too many": lambda true, rng: [str(rng.randrange(40)) for _ in true],
    "wrong from the middle on": lambda true, rng: [
        label if i < len(true) / 2 else wrong(label) for i, label in enumerate(true)
    ],
    "wrong now and then": lambda true, rng: [
        label if i // 300 % 2 else wrong(label) for i, label in enumerate(true)
    ],
}


# Seeds that served no choice of a constant.
@pytest.mark.parametrize("family", ["flood", "heavy_tailed_chat"])
def test_true_labels_add_hits_also_if_one_in_ten_is_wrong(family):
    requests = generate_family(family, 2_500, seed=203)
    prompts, labels, rng = trace_prompts(requests), true_labels(requests), Random(1)
    mostly = [label if rng.random() > 0.1 else wrong(label) for label in labels]
    without = hit_tokens(prompts, 600, "adaptive", 128)
    assert hit_tokens(prompts, 600, "adaptive", 128, labels) > 1.12 * without
    assert hit_tokens(prompts, 600, "adaptive", 128, mostly) > 1.06 * without


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_useless_and_wrong_labels_cost_at_most_two_percent(family, lie):
    """At most 2 % of the hits, or 0.2 % of the prompt tokens where few prompts hit."""
    requests = generate_family(family, 2_500, seed=204)
    prompts = trace_prompts(requests)
    labels = LIES[lie](true_labels(requests), Random(lie))
    least_share = sum(map(len, prompts)) / 500
    for capacity in CAPACITIES:
        without = hit_tokens(prompts, capacity, "adaptive", 128)
        lost = without - hit_tokens(prompts, capacity, "adaptive", 128, labels)
        assert lost <= max(0.02 * without, least_share), capacity


def test_lru_ignores_labels():
    requests = generate_family("flood", 800, seed=203)
    prompts = trace_prompts(requests)
    hits = hit_tokens(prompts, 150, "lru", 128)
    assert hit_tokens(prompts, 150, "lru", 128, true_labels(requests)) == hits


def test_equal_calls_with_labels_give_equal_evictions():
    requests = generate_family("mixture", 1_500, seed=203)
    prompts, labels = trace_prompts(requests), true_labels(requests)
    hits = {hit_tokens(prompts, 300, "adaptive", 128, labels) for _ in range(2)}
    assert len(hits) == 1


def test_memory_does_not_grow_with_the_number_of_labels():
    sizes = []
    for labels in (20, 4_000):
        core = new_core(CacheConfig(block_tokens=128, device_blocks=400))
        for i in range(4_000):
            serve(core, np.full(1_024, i % 60, np.int32), f"label {i % labels}")
        sizes.append(core.statistics().index_bytes)
    assert sizes[1] < 1.05 * sizes[0]


def test_labels_keep_the_invariants_with_shared_and_preempted_leases():
    rng = Random(2)
    core = new_core(CacheConfig(block_tokens=2, device_blocks=64, host_blocks=0))
    live: list[int] = []
    for i in range(4_000):
        tokens = np.array([rng.choice((1, 1, 2)) for _ in range(rng.randint(1, 40))], np.int32)
        lease = core.match(tokens, "")[0]
        while not core.allocate(lease, len(tokens)):
            core.release(live.pop(rng.randrange(len(live))), 0, 0, rng.choice(("", "a", "b")))
        core.commit(lease, len(tokens), 0)
        if rng.random() < 0.2:
            core.truncate(lease, len(tokens), 0)
        if rng.random() < 0.1:
            core.retract(lease, 0)
            core.release(lease, 0, 0, "c")  # it has no blocks
        else:
            live.append(lease)
        if len(live) > 3:
            core.release(live.pop(rng.randrange(3)), 0, 0, rng.choice(("", "a", "b")))
        if i % 16 == 0:
            assert core.violations() == []


def serve(core: Core, tokens: np.ndarray, label: str) -> None:
    lease = core.match(tokens, "")[0]
    assert core.allocate(lease, len(tokens))
    core.commit(lease, len(tokens), 0)
    core.release(lease, 0, 0, label)
