"""A small host arena for tests of stores, and digests for it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from aiokv.layout.host_block import pitch_bytes
from aiokv.stores import StoreMemory
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

PAYLOAD_BYTES = 1000


class Arena:
    """Host blocks whose payloads a test writes and compares."""

    def __init__(self, num_blocks: int = 64, payload_bytes: int = PAYLOAD_BYTES) -> None:
        pitch = pitch_bytes(payload_bytes, with_stores=True)
        self._arena = HostArena(num_blocks=num_blocks, pitch_bytes=pitch)
        self.memory = StoreMemory(
            address=self._arena.pointer,
            num_blocks=num_blocks,
            pitch_bytes=pitch,
            payload_bytes=payload_bytes,
            view=self._arena.blocks.reshape(-1).data,
        )

    def write(self, blocks: Iterable[int], numbers: Iterable[int]) -> None:
        """Fill the payload of each block with the bytes that belong to a number."""
        for block, number in zip(blocks, numbers, strict=True):
            self._arena.blocks[block, : self.memory.payload_bytes] = payload(number)

    def holds(self, block: int, number: int) -> bool:
        """Return True when a block has the payload of a number."""
        return bool(
            (self._arena.blocks[block, : self.memory.payload_bytes] == payload(number)).all()
        )


def payload(number: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, PAYLOAD_BYTES, np.uint8)


def digests(numbers: Iterable[int]) -> bytes:
    """Return one digest per number."""
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in numbers)


def ids(*blocks: int) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)
