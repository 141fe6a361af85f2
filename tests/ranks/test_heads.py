"""Ranks that split one tensor `[B, H, T, D]` by its heads: each copies its own heads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import Regions
from tests.ranks.loopback import LAYERS, Ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.asyncio

BLOCKS, HEADS, TOKENS, HEAD_DIM = 8, 4, 2, 3
A = [1, 2, 3, 4, 5, 6, 7]


class SplitByHeads(Ranked):
    """One rank per slice of heads; ``whole`` are the tensors that they share, one per layer."""

    def __init__(self, path: Path, slices: Sequence[slice]) -> None:
        super().__init__(path, num_ranks=len(slices), device_blocks=BLOCKS, new_device=None)
        shape = (BLOCKS, HEADS, TOKENS, HEAD_DIM)
        self.whole = [np.full(shape, 99, np.float32) for _ in range(LAYERS)]
        for shard, heads in zip(self.shards, slices, strict=True):
            shard.worker.regions = Regions(num_layers=LAYERS)
            shard.worker.regions.add("k", layers=[tensor[:, heads] for tensor in self.whole])


def values(layer: int, block: int) -> np.ndarray:
    """Return a different number in each element of all heads: `[H, T, D]`."""
    size = HEADS * TOKENS * HEAD_DIM
    first = 1000 + (layer * BLOCKS + block) * size
    return np.arange(first, first + size, dtype=np.float32).reshape(HEADS, TOKENS, HEAD_DIM)


@pytest.mark.parametrize(
    "slices",
    [[slice(0, 2), slice(2, 4)], [slice(2, 4)], [slice(0, 1), slice(3, 4)]],
    ids=["two_halves", "second_half_only", "first_and_last"],
)
async def test_ranks_restore_their_own_heads_and_change_no_others(tmp_path, slices):
    async with SplitByHeads(tmp_path, slices) as ranked:
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            for block in range(3):
                for layer, tensor in enumerate(ranked.whole):
                    tensor[lease.block_table[block]] = values(layer, block)
            lease.commit(7)
        ranked.step()
        await ranked.finish()
        await ranked.engine.evict(BLOCKS)
        for tensor in ranked.whole:
            tensor[:] = 77

        expected = [np.full_like(tensor, 77) for tensor in ranked.whole]
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            await lease.layers.wait_all()
            assert lease.cached_tokens == 6
            for block in range(3):
                for layer, tensor in enumerate(expected):
                    for heads in slices:
                        tensor[lease.block_table[block], heads] = values(layer, block)[heads]
        assert all(map(np.array_equal, ranked.whole, expected))
        ranked.step()
