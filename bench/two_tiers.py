"""Hit tokens of a device and a host tier, beside those of one tier of their sum.

On the public conversation trace, for each split of 160,000 blocks of 16 tokens, each write policy
and each eviction policy: hit tokens by tier, their share of the hits of one tier of the sum,
transfers per request, copies to host memory per committed block, and CPU seconds of the index.
Transfers end at once, as the index sees them between two requests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiokv import CacheConfig
from aiokv._native import Outcome
from aiokv.config.cache_config import EVICTION_POLICIES, EvictionPolicy
from aiokv.scheduler.plans import new_core
from aiokv.trace.format import read_trace
from tests.harness.traces import find_trace, trace_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv._native import Core

BLOCK_TOKENS = 16
TOTAL_BLOCKS = 160_000
DEVICE_BLOCKS = (32_000, 80_000, 128_000)
WRITE_POLICIES = (
    "write_through",
    "nth_use:2",
    "write_back",
)


def run(quick: bool) -> dict[str, Any]:
    path = find_trace()
    if path is None:
        return {}
    prompts = trace_prompts(list(read_trace(path, 500 if quick else None)))
    results: dict[str, Any] = {}
    for eviction in EVICTION_POLICIES:
        one_tier = serve(prompts, TOTAL_BLOCKS, 0, "none", eviction)
        results[f"{eviction}_one_tier"] = one_tier
        for device in DEVICE_BLOCKS[:1] if quick else DEVICE_BLOCKS:
            for write in WRITE_POLICIES:
                row = serve(prompts, device, TOTAL_BLOCKS - device, write, eviction)
                row["one_tier_share"] = row["hit_tokens"] / max(1, one_tier["hit_tokens"])
                results[f"{eviction}_{write}_{device}_{TOTAL_BLOCKS - device}"] = row
    return results


def serve(
    prompts: Sequence[NDArray[np.int32]],
    device_blocks: int,
    host_blocks: int,
    write_policy: str,
    eviction_policy: EvictionPolicy,
) -> dict[str, float]:
    """Return the hits and copies of one prompt after the other.

    Args:
        prompts: token ids of each; none is longer than the device tier.
        device_blocks: capacity of the device tier.
        host_blocks: capacity of the host tier.
        write_policy: see ``CacheConfig``.
        eviction_policy: see ``CacheConfig``.
    """
    core = new_core(
        CacheConfig(
            block_tokens=BLOCK_TOKENS,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            write_policy=write_policy,
            eviction_policy=eviction_policy,
        )
    )
    transfers = 0
    began = time.process_time()
    for tokens in prompts:
        transfers += _serve_one(core, tokens)
    seconds = time.process_time() - began
    statistics = core.statistics()
    hit_tokens = statistics.hit_device_tokens + statistics.hit_host_tokens
    return {
        "device_hit_tokens": statistics.hit_device_tokens,
        "host_hit_tokens": statistics.hit_host_tokens,
        "hit_tokens": hit_tokens,
        "transfers_per_request": transfers / max(1, len(prompts)),
        "host_copies_per_committed_block": statistics.attention.offloaded_blocks
        / max(1, statistics.published_blocks),
        "cpu_seconds": seconds,
    }


def _serve_one(core: Core, tokens: NDArray[np.int32]) -> int:
    """Serve one prompt as the engine does; return the number of transfers."""
    transfers = 0
    lease = core.match(tokens, "")[0]
    wanted_blocks = -(-len(tokens) // BLOCK_TOKENS)
    while not core.allocate(lease, len(tokens)):
        saved = core.take_write_backs(wanted_blocks)
        if saved:
            core.complete(saved, Outcome.DONE, 0)
            transfers += 1
        elif core.must_look_further():
            wanted_blocks = min(2 * wanted_blocks, core.device_blocks)
    begun = core.onloads(lease)
    for transfer in begun:
        core.complete(transfer, Outcome.DONE, 0)
    core.commit(lease, len(tokens), 0)
    core.release(lease, 0)
    transfers += len(begun)
    for take in (core.take_backups, core.take_write_backs):
        if transfer := take():
            core.complete(transfer, Outcome.DONE, 0)
            transfers += 1
    return transfers
