"""Device tensors of a model with recurrent state and sliding windows, besides those of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import WORDS, Memory, WrongBytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv import Lease, WindowGroup

STATE_WORDS = 5


class SideMemory(Memory):
    """Tensors whose state and windows identify the tokens that they were computed from, too.

    The state after some positions is the word of the last one. Each group of sliding windows has a
    layer, which has the words of the positions.

    Args:
        state_slots: slots of recurrent state; 0 for a model without.
        windows: groups of sliding windows.
        layers: of the model.
    """

    def __init__(
        self,
        device_blocks: int,
        block_tokens: int,
        *,
        state_slots: int = 0,
        windows: Mapping[str, WindowGroup],
        layers: int = 2,
    ) -> None:
        self._state_slots = state_slots
        self._groups = dict(windows)
        self.windows: dict[str, np.ndarray] = {}
        super().__init__(device_blocks, block_tokens, layers=layers, axes=("tokens", "dim"))

    def take(self, device_blocks: int) -> None:
        super().take(device_blocks)
        # A slot that was not zeroed, or received, is detected.
        self.state = np.full((self._state_slots, STATE_WORDS), 99, np.uint64)
        self.windows = {
            name: np.zeros((group.device_blocks, self.block_tokens, WORDS), np.uint64)
            for name, group in self._groups.items()
        }
        if self._state_slots:
            self.regions.add_state("state", layers=[self.state], layer_indices=[1])
        for name, memory in self.windows.items():
            axes = ("tokens", "dim")
            self.regions.add_window(name, name, layers=[memory], layer_indices=[0], axes=axes)

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest host block of all pools."""
        pools = [self.regions, self.regions.state_blocks()]
        pools += [self.regions.window_blocks(name) for name in self.windows]
        return max(pool.payload_bytes for pool in pools)

    def compute_sides(self, lease: Lease, words: np.ndarray, first: int, end: int) -> None:
        """Check the state and the windows before ``first``, and bring them to ``end``.

        Args:
            lease: that computes positions ``first`` to ``end - 1``.
            words: of its positions.
            first: computed positions.
            end: reached by the windows of the lease.
        """
        self.check_sides(lease, words, first)
        if self._state_slots:
            self.state[lease.state_slot] = _state_after(words, end)
        for name, memory in self.windows.items():
            table = lease.window_table(name)
            for position in range(first, end):
                block = table[position // self.block_tokens]
                assert block >= 0, (name, position)
                memory[block, position % self.block_tokens] = words[position] + np.uint64(7)

    def check_sides(self, lease: Lease, words: np.ndarray, end: int) -> None:
        """Compare the state, and what the next position sees of the windows.

        Raises:
            WrongBytes: they are not those after ``end`` positions.
        """
        after = _state_after(words, end)
        if self._state_slots and (self.state[lease.state_slot] != after).any():
            raise WrongBytes(f"{lease.owner}: the state is not the one after {end} positions")
        for name, memory in self.windows.items():
            group, table = self._groups[name], lease.window_table(name)
            seen = max(end - group.window_tokens + 1, 0)
            for position in (*range(min(group.sink_tokens, seen)), *range(seen, end)):
                block = table[position // self.block_tokens]
                found = memory[block, position % self.block_tokens]
                if block < 0 or (found != words[position] + np.uint64(7)).any():
                    raise WrongBytes(f"{lease.owner}: {name} has not position {position} of {end}")


def _state_after(words: np.ndarray, end: int) -> np.ndarray:
    if not end:
        return np.zeros(STATE_WORDS, np.uint64)
    return np.arange(STATE_WORDS, dtype=np.uint64) + words[end - 1]
