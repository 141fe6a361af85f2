"""MIN: an upper bound of the hit tokens of any eviction policy on a given trace.

Belady's rule on the prefix tree: after each request, keep the blocks whose next use is soonest. A
use of a block is a use of its parent, too, so the kept blocks always form prefixes. The bound is
generous: a running request holds no blocks, and a block that is not worth keeping is never stored.
MIN works on the trace's own blocks of 512 tokens.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING

from aiokv.trace.format import HASH_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from aiokv.trace.format import TraceRequest

_NEVER = 2**31 - 1
_MIN_HEAP = 10_000  # entries; below, stale entries are kept
_Use = tuple[int, int, int]  # (-next use, -depth, block): the first one is evicted first


def min_hit_tokens(requests: Sequence[TraceRequest], capacity_blocks: int) -> int:
    """Return the hit tokens of the optimal cache of ``capacity_blocks`` blocks of 512 tokens."""
    next_uses = _next_uses(requests)
    kept: dict[int, _Use] = {}
    farthest: list[_Use] = []  # a heap of the values of kept, and of stale entries
    hits = 0
    for request, uses in zip(requests, next_uses, strict=True):
        hits += _leading_hits(request, kept)
        full = request.input_tokens // HASH_BLOCK_TOKENS
        for depth, (block, use) in enumerate(zip(request.hash_ids[:full], uses, strict=False)):
            kept[block] = entry = (-use, -depth, block)
            heapq.heappush(farthest, entry)
        while len(kept) > capacity_blocks:
            entry = heapq.heappop(farthest)
            if kept.get(entry[2]) == entry:
                del kept[entry[2]]
        if len(farthest) > 2 * len(kept) + _MIN_HEAP:
            farthest = list(kept.values())
            heapq.heapify(farthest)
    return hits * HASH_BLOCK_TOKENS


def _leading_hits(request: TraceRequest, kept: Container[int]) -> int:
    hits = 0
    for block in request.hash_ids[: _matchable(request)]:
        if block not in kept:
            break
        hits += 1
    return hits


def _matchable(request: TraceRequest) -> int:
    """Return the number of blocks that can be hit: at least one token is left to compute."""
    return (request.input_tokens - 1) // HASH_BLOCK_TOKENS


def _next_uses(requests: Sequence[TraceRequest]) -> list[array[int]]:
    """Return, per block of each request, the index of the next request that could hit it."""
    upcoming: dict[int, int] = {}
    uses: list[array[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        uses.append(array("i", [upcoming.get(block, _NEVER) for block in request.hash_ids]))
        for block in request.hash_ids[: _matchable(request)]:
            upcoming[block] = index
    uses.reverse()
    return uses
