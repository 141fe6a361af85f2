"""A small model with full attention and two groups of sliding windows, computed twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig, CacheEngine, Regions, WindowGroup
from tests.harness.conversations import TwiceComputed

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from aiokv import Lease
    from aiokv.worker.device.base import Device

BLOCK_TOKENS = 2
WINDOWS = {"near": 3, "far": 6}
STEP_TOKENS = 4


def mix(token: int, seen: Sequence[int]) -> int:
    """Return the KV of a position, from all positions that its layer attends to."""
    value = token + 1
    for other in seen:
        value = (value * 6364136223846793005 + other + 1) % 2**64
    return value


def seen_by(position: int, window: int, sink: int) -> list[int]:
    """Return the positions that one position attends to, without itself."""
    first = max(position - window + 1, 0)
    return [*range(min(sink, first)), *range(first, position)]


class Windowed(TwiceComputed):
    """An engine and a model: full attention, and two groups of sliding windows, all with bytes.

    Attributes:
        weights: version of the weights, part of all that the model computes.
    """

    def __init__(
        self,
        *,
        device_blocks: int = 40,
        window_blocks: int = 12,
        sinks: Mapping[str, int] | None = None,
        host_windows: int = 0,
        device: Device | None = None,
        stores: Sequence[Any] = (),
        **config: Any,
    ) -> None:
        if stores:
            config = {"model": "windowed", **config}
        self.weights = 0
        self.sinks = {group: (sinks or {}).get(group, 0) for group in WINDOWS}
        self.kv = np.zeros((device_blocks, BLOCK_TOKENS), np.uint64)
        self.near_and_far = {
            group: np.zeros((window_blocks, BLOCK_TOKENS), np.uint64) for group in WINDOWS
        }
        self.has_host_windows = host_windows > 0
        self.device = device
        windows = {
            group: WindowGroup(
                window_tokens=window,
                device_blocks=window_blocks,
                step_tokens=STEP_TOKENS,
                sink_tokens=self.sinks[group],
                host_blocks=host_windows,
            )
            for group, window in WINDOWS.items()
        }
        sizes = {"block_tokens": BLOCK_TOKENS, "device_blocks": device_blocks}
        config = CacheConfig(windows=windows, **sizes, **config)
        self.engine = CacheEngine(config, self.new_regions(), device, stores=stores)

    def new_regions(self) -> Regions:
        """Return the tensors: a layer of full attention between those of the two groups."""
        regions = Regions(num_layers=3)
        regions.add("kv", layers=[self.kv], layer_indices=[1])
        if self.has_host_windows:
            for layer, (group, memory) in zip((0, 2), self.near_and_far.items(), strict=True):
                regions.add_window(group, group, layers=[memory], layer_indices=[layer])
        return regions

    def tables(self, lease: Lease) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """Return (window, sink, table, memory) of every kind of layer."""
        found = [(10**9, 0, lease.block_table, self.kv)]
        for group, window in WINDOWS.items():
            table = lease.window_table(group)
            found.append((window, self.sinks[group], table, self.near_and_far[group]))
        return found

    def _mix(self, token: int, seen: Sequence[int]) -> int:
        return mix(token + (self.weights << 32), seen)

    def compute(self, lease: Lease, tokens: Sequence[int], first: int, end: int) -> None:
        for window, sink, table, memory in self.tables(lease):
            for position in range(first, end):
                seen = []
                for other in seen_by(position, window, sink):
                    block = table[other // BLOCK_TOKENS]
                    assert block >= 0, (window, position, other)
                    seen.append(int(memory[block, other % BLOCK_TOKENS]))
                block = table[position // BLOCK_TOKENS]
                assert block >= 0
                memory[block, position % BLOCK_TOKENS] = self._mix(tokens[position], seen)

    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Compare all KV that the next position attends to with a recomputation from scratch."""
        for window, sink, table, memory in self.tables(lease):
            values: list[int] = []
            for position in range(num_tokens):
                seen = [values[other] for other in seen_by(position, window, sink)]
                values.append(self._mix(tokens[position], seen))
            for position in seen_by(num_tokens, window, sink):
                block = table[position // BLOCK_TOKENS]
                assert memory[block, position % BLOCK_TOKENS] == values[position], (
                    window,
                    position,
                )

    def prefill(self, lease: Lease, tokens: Sequence[int]) -> None:
        computed = lease.cached_tokens
        while computed < len(tokens):
            end = min(computed + STEP_TOKENS, len(tokens))
            assert end <= lease.max_extend_tokens
            self.compute(lease, tokens, computed, end)
            lease.commit(end)
            computed = end
            self.check(lease, tokens, computed)

    def first_chunk(self, cached: int, length: int, rng: random.Random) -> int:
        return min(cached + rng.randrange(STEP_TOKENS), length)
