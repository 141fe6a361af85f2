"""Hit tokens of the eviction policies, beside each other and the optimum (Belady's MIN).

For each family of generated traces, for the public trace when it is here, and for each capacity:
hit tokens of ``lru`` and ``adaptive`` as shares of MIN's, and ``adaptive`` as a ratio of ``lru``.
Capacities are in blocks of 512 tokens. Seeds are those on which no constant was chosen:
``tests.harness.trace_families`` names the families and seeds that served the choice.
``bench.policy_sweep`` adds more capacities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.trace.format import read_trace
from aiokv.trace.min_oracle import min_hit_tokens
from bench import policy_sweep
from tests.harness.trace_families import FAMILIES, generate_family
from tests.harness.traces import find_trace, find_traces, hit_tokens, trace_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.trace.format import TraceRequest

TRACE_CAPACITIES = (100, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
FAMILY_CAPACITIES = (100, 300, 1_000, 3_000, 10_000)
SEEDS = (200, 201)
CHANGING_SEEDS = range(200, 240)
CHANGING_CAPACITIES = (100, 300, 1_000, 3_000)


def run(quick: bool) -> dict[str, Any]:
    results = {}
    for name in FAMILIES:
        for seed in SEEDS[:1] if quick else SEEDS:
            requests = generate_family(name, 300 if quick else 6_000, seed=seed)
            capacities = FAMILY_CAPACITIES[:2] if quick else FAMILY_CAPACITIES
            results[f"{name}_{seed}"] = _ratios(requests, capacities, block_tokens=64)
    results["changing_traffic"] = _changing_traffic(CHANGING_SEEDS[:2] if quick else CHANGING_SEEDS)
    path = find_trace()
    if path is not None:
        requests = list(read_trace(path))
        capacities = (1_000,) if quick else TRACE_CAPACITIES
        results["trace"] = _ratios(requests[:2_000] if quick else requests, capacities)
    results["sweep"] = policy_sweep.run(quick, find_traces())
    return results


def _changing_traffic(seeds: Sequence[int]) -> dict[str, float]:
    """Compare the policies where the traffic changes within the first capacities of a trace."""
    ratios: list[float] = []
    for seed in seeds:
        prompts = trace_prompts(generate_family("mixture", 3_000, seed=seed))
        hits = [
            (
                hit_tokens(prompts, capacity, "adaptive", 64),
                hit_tokens(prompts, capacity, "lru", 64),
            )
            for capacity in CHANGING_CAPACITIES
        ]
        ratios += [adaptive / lru for adaptive, lru in hits if lru]
    ratios.sort()
    return {
        "cases": len(ratios),
        "least_adaptive_lru_ratio": ratios[0],
        "second_least_adaptive_lru_ratio": ratios[1],
        "cases_below_0.99": sum(ratio < 0.99 for ratio in ratios),
    }


def _ratios(
    requests: Sequence[TraceRequest], capacities: Sequence[int], *, block_tokens: int = 16
) -> dict[str, Any]:
    prompts = trace_prompts(requests)
    results: dict[str, Any] = {}
    for capacity in capacities:
        best = max(1, min_hit_tokens(requests, capacity))
        lru = hit_tokens(prompts, capacity, "lru", block_tokens)
        adaptive = hit_tokens(prompts, capacity, "adaptive", block_tokens)
        results[f"{capacity}_blocks"] = {
            "lru_hit_tokens": lru,
            "adaptive_hit_tokens": adaptive,
            "lru_min_ratio": lru / best,
            "adaptive_min_ratio": adaptive / best,
        }
        if lru > 0:
            results[f"{capacity}_blocks"]["adaptive_lru_ratio"] = adaptive / lru
    return results
