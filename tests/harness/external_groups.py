"""Groups of a server's blocks beside full attention, with bytes that identify the prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv import WindowGroup
from tests.harness.cache import BLOCK_TOKENS
from tests.harness.memory import Memory

if TYPE_CHECKING:
    from aiokv import Regions

# Windows of 1.25 and 2.25 blocks, two kinds of recurrent state, and further full attention.
GROUPS = {
    "near": {"window_tokens": 6},
    "far": {"window_tokens": 10, "sink_tokens": 2},
    "mamba": {"retention": "last"},
    "mamba2": {"retention": "last"},
    "full": {"retention": "all"},
}


class ExternalGroup:
    """A group, the tensors of its layers, and the blocks that the server keeps of it."""

    def __init__(self, name: str, number: int, device_blocks: int, host_blocks: int) -> None:
        self.name = name
        self.config = WindowGroup(
            device_blocks=device_blocks, host_blocks=host_blocks, **GROUPS[name]
        )
        self.memory = Memory(device_blocks, BLOCK_TOKENS, layers=1, names=("kv",), rank=number + 1)

    @property
    def is_state(self) -> bool:
        return self.config.retention == "last"

    def register(self, regions: Regions, layer: int) -> None:
        regions.add_window(self.name, self.name, layers=self.memory.tensors, layer_indices=[layer])

    def is_kept(self, block: int, num_tokens: int) -> bool:
        """Return True if the position behind ``num_tokens`` needs the block."""
        if block < -(-self.config.sink_tokens // BLOCK_TOKENS):
            return True
        return block >= (num_tokens - self.config.retained_tokens) // BLOCK_TOKENS

    def needed(self, hits: int) -> list[int]:
        """Return the blocks that a hit of ``hits`` blocks needs."""
        return [block for block in range(hits) if self.is_kept(block, hits * BLOCK_TOKENS)]


def external_groups(
    names: tuple[str, ...], device_blocks: int, host_blocks: int
) -> dict[str, ExternalGroup]:
    """Return groups whose ids are those of one pool of ``device_blocks``."""
    return {
        name: ExternalGroup(name, number, device_blocks, host_blocks)
        for number, name in enumerate(names)
    }
