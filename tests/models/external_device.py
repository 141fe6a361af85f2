"""Model of a server that owns its device blocks: ids with reference counts, and a prefix cache.

Blocks have real bytes. The server reuses a block when no request has it, its requests have given it
up, and each of them is idle; ``hurry`` lets it forget the last rule.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

BLOCK_BYTES = 8
GARBAGE = np.full(BLOCK_BYTES, 0xEE, np.uint8)


def block_bytes(weights: int, tokens: Sequence[int]) -> NDArray[np.uint8]:
    """Return the KV of the block that ends a prefix, under one version of the weights."""
    text = f"{weights}:{','.join(map(str, tokens))}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=BLOCK_BYTES).digest(), np.uint8)


class ExternalDevice:
    """Device blocks of a server.

    Attributes:
        memory: ``[num_blocks, BLOCK_BYTES]`` uint8.
        leaving: blocks that requests have given up before they were idle, with the lease of each.
    """

    def __init__(self, num_blocks: int) -> None:
        self.memory = np.tile(GARBAGE, (num_blocks, 1))
        self.leaving: list[tuple[int, list[int]]] = []
        self._refs = [0] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def free(self) -> list[int]:
        """Blocks that no request has."""
        return [block for block, refs in enumerate(self._refs) if not refs]

    def take(self, blocks: Sequence[int]) -> None:
        """Give these blocks to a request that will write them."""
        for block in blocks:
            self._refs[block] += 1
            self.forget(block)

    def share(self, blocks: Sequence[int]) -> None:
        """Give these cached blocks to one more request, which reads them."""
        for block in blocks:
            self._refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Take blocks back from a request that has named them to no lease, or is idle."""
        for block in blocks:
            self._refs[block] -= 1

    def give_up(self, lease_id: int, blocks: Sequence[int]) -> None:
        """Note that a request no longer needs blocks; its transfers may still use them."""
        if blocks:
            self.leaving.append((lease_id, list(blocks)))

    def collect(self, is_idle: Callable[[int], bool]) -> None:
        """Free the blocks of leases that are idle."""
        for lease_id, blocks in list(self.leaving):
            if is_idle(lease_id):
                self.leaving.remove((lease_id, blocks))
                self.drop(blocks)

    def hurry(self) -> list[int]:
        """Free the blocks of all leases that have given them up; return them."""
        blocks = [block for _, given_up in self.leaving for block in given_up]
        self.leaving.clear()
        self.drop(blocks)
        return blocks

    def cache(self, content: NDArray[np.uint8], block: int) -> None:
        """Note that a block holds the KV of a full block."""
        self._cached[content.tobytes()] = block

    def find(self, content: NDArray[np.uint8]) -> int | None:
        """Return the block that holds this KV, if any."""
        return self._cached.get(content.tobytes())

    def forget(self, block: int) -> None:
        """Note that a block will be written."""
        for content in [content for content, has in self._cached.items() if has == block]:
            del self._cached[content]
