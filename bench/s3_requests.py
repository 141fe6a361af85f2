"""Requests to an object store on the conversation trace: bundles beside one object per block.

Each request of the trace looks up its prompt, loads the stored prefix and saves the other blocks,
256 at a time, as an engine with 16 tokens per block does. No engine keeps blocks in memory, so each
prefix is loaded from the store. The store's index of bundles has the size for 100,000 host blocks.
``blocks`` is what one object per block costs: a request per key of a lookup (64 per round, see
``aiokv.stores.search``), a GET per load, and a HEAD and a PUT per save. No bytes move.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.stores.bundles import Bundle, BundleIndex, Cuts, PrefixWalk
from aiokv.stores.search import PrefixSearch
from aiokv.trace.format import read_trace
from bench.harness import find_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS_PER_ID = 512 // 16
SAVE_BLOCKS = 256
HOST_BLOCKS = 100_000
WIDTH = 64


def run(quick: bool) -> dict[str, Any]:
    path = find_trace()
    if path is None:
        return {}
    prompts = [request.hash_ids for request in read_trace(path, 500 if quick else 4_000)]
    return {f"object_{kib}_kib": _compared(prompts, kib << 10) for kib in (128, 2_048)}


def _compared(prompts: Sequence[Sequence[int]], object_bytes: int) -> dict[str, Any]:
    cuts, index = Cuts(object_bytes), BundleIndex(HOST_BLOCKS)
    stored: dict[bytes, Bundle] = {}
    present: set[bytes] = set()
    blocks: Counter[str] = Counter()
    bundles: Counter[str] = Counter()
    for ids in prompts:
        keys = [
            hashlib.sha256(b"%d %d" % (block, i)).digest()
            for block in ids
            for i in range(BLOCKS_PER_ID)
        ]
        end = next((i for i, key in enumerate(keys) if key not in present), len(keys))
        blocks["lookup"] += _searched(len(keys), end)
        blocks["load"] += end
        blocks["save"] += 2 * (len(keys) - end)
        walk = PrefixWalk(keys, index, cuts, WIDTH)
        while asked := walk.next_keys():
            bundles["lookup"] += len(asked)
            for first in asked:
                if first in stored:
                    index.add(stored[first])
        assert walk.end == end, (walk.end, end)
        bundles["load"] += len(index.runs(keys[:end]))
        for begin in range(end, len(keys), SAVE_BLOCKS):
            part = keys[begin : begin + SAVE_BLOCKS]
            for first, last in cuts.runs(part, [True] * len(part)):
                bundle = Bundle(part[first:last], object_bytes)
                stored[bundle.keys[0]] = bundle
                index.add(bundle)
                bundles["save"] += 2
        present |= set(keys[end:])
    ratios = {f"{name}_share_of_requests": bundles[name] / blocks[name] for name in blocks}
    return {
        "blocks": dict(blocks),
        "bundles": dict(bundles),
        **ratios,
        "all_share_of_requests": bundles.total() / blocks.total(),
    }


def _searched(num_keys: int, end: int) -> int:
    """Return the keys that a search of a prefix with ``end`` stored blocks asks for."""
    search = PrefixSearch(1, np.zeros(num_keys, np.bool_), np.zeros(num_keys, np.bool_), WIDTH)
    count = 0
    while len(asked := search.next_keys()):
        count += len(asked)
        search.note(asked, (asked < end)[np.newaxis])
    return count
