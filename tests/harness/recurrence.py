"""A small hybrid model that is computed twice: recurrent state beside KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig, CacheEngine, Regions
from tests.harness.conversations import TwiceComputed

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from aiokv import Lease
    from aiokv.worker.device.base import Device

LAYERS = 3
STATE_LAYERS = (0, 2)  # the middle one has attention only
BLOCK_TOKENS = 2
WIDTH = 3


def advance(state: np.ndarray, token: int, layer: int) -> np.ndarray:
    """One position of the recurrence; order matters, and every bit."""
    return state * np.uint64(6364136223846793005) + np.uint64(2 * (token + 7 * layer) + 1)


def mix(before: int, token: int, layer: int, state: np.ndarray) -> int:
    """The KV of a position, from that of the one before."""
    return (31 * before + token + layer + sum(state.tolist())) % 2**64


def state_after(tokens: Sequence[int], layer: int) -> np.ndarray:
    state = np.zeros(WIDTH, np.uint64)
    for token in tokens:
        state = advance(state, token, layer)
    return state


class Hybrid(TwiceComputed):
    """An engine, its tensors, and the model. The KV of a position is a digest of all before it.

    Attributes:
        weights: version of the weights, part of all that the model computes.
    """

    def __init__(
        self,
        *,
        device_blocks: int = 32,
        state_slots: int = 4,
        device: Device | None = None,
        stores: Sequence[Any] = (),
        **config: Any,
    ) -> None:
        if stores:
            config = {"model": "hybrid", **config}
        self.kv = [np.zeros((device_blocks, BLOCK_TOKENS), np.uint64) for _ in range(LAYERS)]
        # dirty: use of a slot that was not zeroed is detected
        self.state = [np.full((state_slots, WIDTH), 99, np.uint64) for _ in STATE_LAYERS]
        self.device = device
        self.weights = 0
        sizes = {"device_blocks": device_blocks, "state_slots": state_slots}
        self.engine = CacheEngine(
            CacheConfig(block_tokens=BLOCK_TOKENS, **sizes, **config),
            self.new_regions(),
            device,
            stores=stores,
        )

    def new_regions(self) -> Regions:
        regions = Regions(num_layers=LAYERS)
        regions.add("kv", layers=self.kv)
        regions.add_state("gdn", layers=self.state, layer_indices=STATE_LAYERS)
        return regions

    def _weighted(self, tokens: Sequence[int]) -> Sequence[int]:
        return [int(token) + (self.weights << 32) for token in tokens]

    def compute(self, lease: Lease, tokens: Sequence[int], first: int, end: int) -> None:
        """Compute positions from ``first`` on, from the state and the KV before them."""
        table, slot = lease.block_table, lease.state_slot
        tokens = self._weighted(tokens)
        for position in range(first, end):
            for state, layer in zip(self.state, STATE_LAYERS, strict=True):
                state[slot] = advance(state[slot], tokens[position], layer)
            for layer, kv in enumerate(self.kv):
                before = 0
                if position:
                    block, place = divmod(position - 1, BLOCK_TOKENS)
                    before = int(kv[table[block], place])
                block, place = divmod(position, BLOCK_TOKENS)
                state = self.state[layer // 2][slot]
                kv[table[block], place] = mix(before, tokens[position], layer, state)

    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Compare state and KV bit for bit with a recomputation of these tokens from scratch."""
        slot, table = lease.state_slot, lease.block_table
        tokens = self._weighted(tokens)
        for state, layer in zip(self.state, STATE_LAYERS, strict=True):
            assert np.array_equal(state[slot], state_after(tokens[:num_tokens], layer))
        for layer, kv in enumerate(self.kv):
            expected = 0
            state = np.zeros(WIDTH, np.uint64)
            for position in range(num_tokens):
                state = advance(state, tokens[position], STATE_LAYERS[layer // 2])
                expected = mix(expected, tokens[position], layer, state)
                block, place = divmod(position, BLOCK_TOKENS)
                assert kv[table[block], place] == expected, (layer, position)

    def prefill(self, lease: Lease, tokens: Sequence[int], *, save: bool = True) -> None:
        """Compute all uncached positions in chunks that end at snapshot points."""
        computed = lease.cached_tokens
        points = lease.snapshot_points if save else ()
        for end in [*points, len(tokens)]:
            self.compute(lease, tokens, computed, end)
            lease.commit(end)
            computed = max(computed, end)
            if end in points:
                lease.snapshot(end)

    def first_chunk(self, cached: int, length: int, rng: random.Random) -> int:
        return max(length // 2, cached)

    @property
    def can_fork(self) -> bool:
        return self.engine.statistics().groups["state"].device.free > 0
