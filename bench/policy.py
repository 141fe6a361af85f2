"""Hit tokens of the eviction policies as a share of the optimum (Belady's MIN).

The public trace when available, and generated ones: conversations with short and long gaps,
and more shared prompts than fit, requested cyclically. Blocks of 16 tokens; capacities in blocks
of 512.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv import CacheConfig
from aiokv.scheduler.plans import new_core
from aiokv.trace.format import HASH_BLOCK_TOKENS, TraceRequest, expand_tokens, read_trace
from aiokv.trace.min_oracle import min_hit_tokens
from aiokv.trace.synthetic import generate_trace
from bench.harness import find_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.config import EvictionPolicy

BLOCK_TOKENS = 16
TRACE_CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
POLICIES: tuple[EvictionPolicy, ...] = ("lru", "s3fifo")


def run(quick: bool) -> dict[str, Any]:
    results = {
        name: _ratios(requests, (300, 1_000)) for name, requests in _generated(quick).items()
    }
    path = find_trace()
    if path is not None:
        requests = list(read_trace(path))
        capacities = (1_000,) if quick else TRACE_CAPACITIES
        results["trace"] = _ratios(requests[:2_000] if quick else requests, capacities)
    return results


def _generated(quick: bool) -> dict[str, list[TraceRequest]]:
    n = 600 if quick else 6_000
    return {
        "short_gaps": generate_trace(n, live_conversations=20, turn_tokens=1_500),
        "long_gaps": generate_trace(n, live_conversations=400, turn_tokens=3_000),
        "loop": _loop(n, documents=150, blocks=10),
    }


def _loop(num_requests: int, *, documents: int, blocks: int) -> list[TraceRequest]:
    return [
        TraceRequest(
            timestamp_ms=i,
            input_tokens=blocks * HASH_BLOCK_TOKENS,
            output_tokens=1,
            hash_ids=list(range(i % documents * blocks, (i % documents + 1) * blocks)),
        )
        for i in range(num_requests)
    ]


def _ratios(requests: Sequence[TraceRequest], capacities: Sequence[int]) -> dict[str, Any]:
    prompts = trace_prompts(requests)
    results: dict[str, Any] = {}
    for capacity in capacities:
        best = max(1, min_hit_tokens(requests, capacity))
        results[f"{capacity}_blocks"] = {
            f"{policy}_min_ratio": hit_tokens(prompts, capacity, policy) / best
            for policy in POLICIES
        }
    return results


def trace_prompts(requests: Sequence[TraceRequest]) -> list[NDArray[np.int32]]:
    return [expand_tokens(request) for request in requests]


def hit_tokens(
    prompts: Sequence[NDArray[np.int32]],
    capacity_blocks: int,
    policy: EvictionPolicy,
    block_tokens: int = BLOCK_TOKENS,
) -> int:
    """Return hit tokens per prompt in a cache of ``capacity_blocks`` blocks of 512 tokens."""
    core = new_core(
        CacheConfig(
            block_tokens=block_tokens,
            device_blocks=capacity_blocks * (HASH_BLOCK_TOKENS // block_tokens),
            eviction_policy=policy,
        )
    )
    for tokens in prompts:
        lease = core.match(tokens, "")[0]
        core.allocate(lease, len(tokens))
        core.commit(lease, len(tokens), 0)
        core.release(lease, 0)
    return core.statistics().hit_device_tokens
