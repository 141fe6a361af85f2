"""Hit tokens with the bit length of the number of output tokens as the label of each release.

For each trace of ``AIOKV_TRACE`` and capacity in blocks of 512 tokens, with ``adaptive``:
``hit_tokens`` without labels; ``gain``, the hits with labels relative to these; and
``shuffled_gain``, the largest of two orders of the same labels at random, which shows what a label
without meaning gains.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from aiokv.trace.format import HASH_BLOCK_TOKENS, expand_tokens, read_trace
from tests.harness.traces import find_traces, hit_tokens

if TYPE_CHECKING:
    from pathlib import Path

CAPACITIES = (500, 1_000, 2_000, 4_000)


def run(quick: bool) -> dict[str, dict[str, float]]:
    return {
        f"{path.name.split('.')[0]}.{capacity}_blocks": _gains(path, capacity, quick)
        for path in find_traces()
        for capacity in (CAPACITIES[:1] if quick else CAPACITIES)
    }


def _gains(path: Path, capacity: int, quick: bool) -> dict[str, float]:
    limit = 200 if quick else None
    labels = [str(each.output_tokens.bit_length()) for each in read_trace(path, limit)]

    def hits(labels: list[str] | None) -> int:
        prompts = (expand_tokens(request) for request in read_trace(path, limit))
        return hit_tokens(prompts, capacity, "adaptive", HASH_BLOCK_TOKENS, labels)

    without = max(hits(None), 1)
    shuffled = [hits(Random(seed).sample(labels, len(labels))) for seed in range(1 if quick else 2)]
    return {
        "hit_tokens": without,
        "gain": hits(labels) / without,
        "shuffled_gain": max(shuffled) / without,
    }
